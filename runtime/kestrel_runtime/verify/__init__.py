"""Accepts checkpoints: compares an engine's answers, and tensors of the model family, with recorded ones."""
