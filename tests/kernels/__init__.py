"""Tests of `kestrel_ops`, one file per module."""
