"""Finds, downloads and reads checkpoints and tokenizers."""
