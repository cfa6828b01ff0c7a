"""Checkpoints and tokenizers: finding, downloading and reading them."""
