"""The gRPC frontend: services, interceptors, health and reflection."""
