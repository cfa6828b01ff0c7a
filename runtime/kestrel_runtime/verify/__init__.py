"""Acceptance of a checkpoint: an engine's answers, and tensors that the model family compares."""
