"""Serves the REST API, compatible with Moondream's. Knows its own JSON and no other frontend."""
