"""Runs `kestrel-grpc batch`: reads requests from files or tables, has them answered, and writes the answers."""
