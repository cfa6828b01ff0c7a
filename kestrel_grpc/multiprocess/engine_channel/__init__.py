"""Connects front ends to engine cores: an engine in another process, its messages, and the choice of a core."""
