"""Runs one engine in one process: its threads, its loop, and its recovery from failed steps."""
