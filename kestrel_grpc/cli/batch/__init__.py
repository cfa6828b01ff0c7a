"""Implements `kestrel-grpc batch`: reads requests from files or tables, sends them, and writes the answers."""
