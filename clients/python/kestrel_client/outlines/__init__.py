"""Outlines of objects as polygons and masks. Knows no messages."""
