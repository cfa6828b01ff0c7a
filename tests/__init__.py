"""The tests: one folder per package, one file per module."""
