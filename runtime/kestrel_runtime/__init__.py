"""The engine: requests in, events out. It knows models, pages and batches; it knows no protobuf and no sockets."""
