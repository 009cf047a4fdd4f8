"""Arrays of several libraries as numbers on a grid, further fields on the grid, and which gaps are filled."""
