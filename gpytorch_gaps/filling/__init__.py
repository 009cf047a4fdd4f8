"""What ``fill_gaps`` is made of: kinds of arrays, what axes mean, kernels for them, training, a held-out check."""
