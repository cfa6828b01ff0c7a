"""Defines the decoder."""
