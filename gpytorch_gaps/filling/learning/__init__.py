"""The model: a mean, a kernel and noise, chosen and trained on windows of the grid."""
