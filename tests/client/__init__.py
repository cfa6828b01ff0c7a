"""Tests of `kestrel_client`, one file per module."""
