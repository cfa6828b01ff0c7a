"""Shares what the HTTP frontends need: connections, checks of headers, bodies, event streams, JSON."""
