"""Tests of `kestrel_runtime.processes`."""
