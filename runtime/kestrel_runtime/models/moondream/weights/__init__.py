"""From the tensors of a checkpoint to a checked state and its dimensions."""
