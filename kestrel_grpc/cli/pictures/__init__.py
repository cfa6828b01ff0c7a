"""Draws results onto their image."""
