"""What the dimensions of an array mean, and the coordinates that kernels receive."""
