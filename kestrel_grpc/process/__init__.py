"""Sets up a process of the server and ends it: everything that it needs of the operating system."""
