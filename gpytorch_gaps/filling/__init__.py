"""``fill_gaps``: adapters for arrays, the interpretation of axes, and the choice, training and check of a model."""
