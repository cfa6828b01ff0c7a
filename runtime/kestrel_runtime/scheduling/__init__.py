"""Decides which sequences run in the next step and which pages they own. Pure decisions: no torch, no clock, no
threads."""
