"""From images to embeddings: crops, the encoder, and graphs of encodings."""
