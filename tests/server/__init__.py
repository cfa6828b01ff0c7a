"""Tests of `kestrel_grpc`, one file per module."""
