"""Turns sampled tokens into an answer: which tokens may come, what they mean, and where the answer ends."""
