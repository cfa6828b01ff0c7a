"""Multiplies rows by matrices: blocks of a decode step, and products in float8 or with what follows them."""
