"""Clients of others, each in an environment of its own, against a true server with the built-in model."""
