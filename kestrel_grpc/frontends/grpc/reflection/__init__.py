"""Server reflection, with the comments of the contract."""
