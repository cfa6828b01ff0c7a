"""Tests of `kestrel_runtime`, one file per module."""
