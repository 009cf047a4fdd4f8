"""The choice of withheld observations, and the expected error in the gaps from their predictions."""
