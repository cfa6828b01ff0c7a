"""Images on their way to the server: what callers may pass, and how a call sends it. Decodes no image format."""
