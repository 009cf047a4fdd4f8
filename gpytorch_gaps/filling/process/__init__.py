"""The steps of a filling, in memory and streamed, and its report."""
