"""The code that a published checkpoint brings, reduced to its public methods."""
