"""Turns sampled tokens into an answer: which tokens are allowed, what they mean, and where the answer ends."""
