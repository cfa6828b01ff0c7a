"""Attacks on a server of our own, and what others notice of them."""
