"""Normalises, activates and quantises whole rows."""
