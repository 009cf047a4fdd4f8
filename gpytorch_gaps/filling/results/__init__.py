"""What a filling returns, and what it can still predict."""
