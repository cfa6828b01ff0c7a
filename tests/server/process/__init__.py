"""Tests of what a process of the server needs of the operating system."""
