"""Monotone transforms of the data, after which they are closer to normal, and what predictions are in their units."""
