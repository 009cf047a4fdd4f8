"""The results of a filling, and further predictions from them."""
