"""What users of the engine import: requests, events, errors, configuration and the engine protocol. No torch."""
