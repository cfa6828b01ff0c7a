"""Outlines of objects as polygons and masks."""
