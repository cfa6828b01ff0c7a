"""Shared by all frontends: the context of a call, the table of errors, limits."""
