"""Trains the example adapter of the built-in model: it calls "gold" what the model calls "yellow"."""
