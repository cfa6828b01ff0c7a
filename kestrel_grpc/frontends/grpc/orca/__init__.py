"""Holds the generated messages of `proto/compat/xds`."""
