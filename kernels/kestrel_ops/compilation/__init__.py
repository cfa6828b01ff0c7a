"""Compiles kernels, launches them, and keeps what a start has found out."""
