"""Runs the processes that serve one port: the supervisor, front ends, engine cores, and links between them."""
