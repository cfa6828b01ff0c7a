"""The model families the engine can run, one package each."""
