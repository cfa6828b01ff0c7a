"""Turns image files into pixels and crops, within limits."""
