"""Image bytes to pixels and crops, within limits."""
