"""Every option of the server, and where its value comes from."""
