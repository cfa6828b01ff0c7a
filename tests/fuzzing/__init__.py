"""Malformed and hostile input: requests, images and frames, drawn at random around valid ones."""

from hypothesis import HealthCheck

UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
"""What is no fault of a test that draws whole files."""
