"""Decides which sequences run in the next step and which pages they own. Uses no torch, clock or threads."""
