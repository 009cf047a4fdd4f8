"""The interpretation of the dimensions of an array, and the coordinates that kernels receive."""
