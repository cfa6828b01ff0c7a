"""`make test-ray`: the application for Ray Serve, on a cluster of one machine without a GPU."""
