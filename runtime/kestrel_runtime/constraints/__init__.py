"""Compiles the constraints of answers, follows the answers, and makes masks of the tokens that are allowed next."""
