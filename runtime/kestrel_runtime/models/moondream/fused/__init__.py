"""Paths that run fused operations on rearranged weights."""
