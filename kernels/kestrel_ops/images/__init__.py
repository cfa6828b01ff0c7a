"""Resizes images."""
