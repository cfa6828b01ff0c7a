"""Trains Moondream Nano: a world of drawn scenes, a small Moondream 3, and the recipe that joins them."""
