"""Measures the memory of the host and the device, and divides it."""
