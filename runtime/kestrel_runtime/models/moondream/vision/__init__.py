"""Turns images into embeddings: crops, the encoder, and graphs of encodings."""
