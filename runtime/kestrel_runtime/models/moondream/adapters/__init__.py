"""LoRA adapters of Moondream: file formats, checks, and weights in slots."""
