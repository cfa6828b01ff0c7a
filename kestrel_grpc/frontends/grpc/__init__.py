"""Serves the gRPC API: services, method handlers, health and reflection."""
