"""Reads and checks LoRA adapters of Moondream, and keeps their weights in slots."""
