"""Finds, reads, loads and leases adapters. It knows no model family, no formats and no tensors' names."""
