"""One servicer per service of the wire contract, one short method per RPC."""
