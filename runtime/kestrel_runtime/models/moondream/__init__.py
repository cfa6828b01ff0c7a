"""Moondream 2 and 3: one code base, told apart by `config.json` alone."""
