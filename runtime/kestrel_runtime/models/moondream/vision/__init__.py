"""From images to embeddings: tiles, the encoder, and graphs of encodings."""
