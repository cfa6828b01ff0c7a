"""Whether every path, kernel and mode of the engine computes what it should."""
