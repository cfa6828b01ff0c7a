"""One engine in one process: its threads, its loop, and what happens when a step fails."""
