"""Which observations are withheld, and what their predictions say of the error in the gaps."""
