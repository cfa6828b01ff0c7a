"""What the load is made of: requests, load processes, a server, and what becomes of their numbers."""
