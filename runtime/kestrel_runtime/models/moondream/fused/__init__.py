"""Runs fused operations on rearranged weights."""
