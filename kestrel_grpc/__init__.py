"""The server: the wire in, the wire out. It knows sockets, protobuf and signals; it knows no tensors."""

__version__ = "0.1.0"
