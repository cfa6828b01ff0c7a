"""The documentation site: `make docs` builds it with `hooks.py`, and checks it with `built_site.py`."""
