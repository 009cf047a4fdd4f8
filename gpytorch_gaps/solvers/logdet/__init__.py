"""Log-determinants of ``W K W' + D``: exact, stochastic, and the paper's Nystrom approximation."""
