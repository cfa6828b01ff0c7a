"""Serves the web UI at `/` of the HTTP port, on which people ask the model about a picture."""
