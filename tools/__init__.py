"""Commands for those who change this code: what its structure is, and what its tests notice."""
