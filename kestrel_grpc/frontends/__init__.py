"""Serves each API of the server by a package of its own."""
