"""Finds, reads, loads and leases adapters. Formats and names of tensors belong to the model families."""
