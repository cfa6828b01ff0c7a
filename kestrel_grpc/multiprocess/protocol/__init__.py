"""Carries messages between the processes of a server: frames, questions with answers, and two transports."""
