"""What texts come with: why they end, how likely their tokens were, and further samples."""
