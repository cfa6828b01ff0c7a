"""Constraints of answers: the value that requests hold, and its bounds."""
