"""Runs `kestrel-grpc bench`: generates load on a server and reports what it measured."""
