"""The gRPC frontend: services, method handlers, health and reflection."""
