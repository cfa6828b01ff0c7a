"""Bounded memory of recent requests: tokens of prompts, matchers of constraints."""
