"""Implements the commands of `kestrel-grpc`, one module or package each, and the code that they share."""
