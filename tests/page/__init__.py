"""The page of the HTTP port in a browser: `python -m tests.page`, which is `make test-page`."""
