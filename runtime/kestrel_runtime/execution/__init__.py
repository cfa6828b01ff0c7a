"""Runs steps on a device: inputs, key-value cache, CUDA streams and graphs, sampling."""
