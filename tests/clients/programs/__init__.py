"""What the clients of others do; each runs in an environment of its own, as a script."""
