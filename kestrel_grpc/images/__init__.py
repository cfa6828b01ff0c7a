"""Finds the images that requests name: images of allowed addresses, which are fetched, and stored images."""
