"""Image bytes to pixels and tiles, within limits."""
