"""Implements Moondream 2 and 3. The code is the same for both; `config.json` says which one a checkpoint is."""
