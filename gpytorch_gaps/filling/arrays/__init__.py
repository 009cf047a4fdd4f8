"""Arrays of several libraries as numbers on a grid, what is beside them, and which of their gaps are filled."""
