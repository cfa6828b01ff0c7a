"""Computes mixtures of experts in 16, 8 and 4 bits."""
