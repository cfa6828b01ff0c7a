"""Defines every option of the server, and finds its value."""
