"""Tests of the contract in `proto/` and of what is generated from it."""
