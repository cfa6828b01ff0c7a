"""Adds the products of low-rank adapters, each row with those of its own slot."""
