"""Contains the model families that the engine can run, one package each, and their registry."""
