"""Defines the public types of the engine: requests, events, errors, configuration and the engine protocol.

Users of the engine import from here; nothing here imports torch.
"""
