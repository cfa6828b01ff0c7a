"""Implements `kestrel-grpc bench`: generates load on a server and reports its measurements."""
