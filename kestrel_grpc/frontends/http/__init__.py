"""What the HTTP frontends share: connections, checks of headers, bodies, event streams, JSON."""
