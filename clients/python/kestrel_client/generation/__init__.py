"""Parts of a text answer besides the text: finish reason, log probabilities and further samples."""
