"""Monotone transforms that make data closer to normal, and predictions in the units of the data."""
