"""``fill_gaps``: adapters for arrays, the meaning of axes, the choice of a model, its training and check."""
