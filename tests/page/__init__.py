"""The page of the HTTP port, and that of a tutorial, in a browser: `make test-page`, or `python -m tests.page`."""
