"""Tests of the load harness and of the checkpoints it makes."""
