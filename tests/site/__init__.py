"""The documentation site: `make docs` builds it with `hooks.py`, checks it, and runs the tutorials in it."""
