"""The public types of the engine: requests, events, errors, configuration and the engine protocol. No torch."""
