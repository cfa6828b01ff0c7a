"""Serves the KServe v2 protocol with the extensions of NVIDIA Triton over gRPC."""
