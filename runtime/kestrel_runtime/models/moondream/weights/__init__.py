"""Turns the tensors of a checkpoint into a checked state and its dimensions."""
