"""Shared by the HTTP frontends: connections, checks of headers, bodies, event streams, JSON."""
