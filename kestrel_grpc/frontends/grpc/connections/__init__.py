"""The sockets under gRPC's servers: where they listen, and when their connections are closed."""
