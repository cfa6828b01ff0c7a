"""Makes the documentation site: `make docs` runs MkDocs with `hooks.py`."""
