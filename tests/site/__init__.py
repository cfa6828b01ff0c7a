"""Checks the documentation site that `make docs` has built, and runs the tutorials."""
