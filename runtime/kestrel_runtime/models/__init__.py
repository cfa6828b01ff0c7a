"""Contains the model families that the engine can run, one package each, and the registry that finds them by name."""
