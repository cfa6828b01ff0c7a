"""Computes products, attention and experts whose rows have the same bits in any batch."""
