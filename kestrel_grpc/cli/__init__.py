"""The commands of `kestrel-grpc`, one module each, and what they share."""
