"""From the logits of a step to the tokens that it samples."""
