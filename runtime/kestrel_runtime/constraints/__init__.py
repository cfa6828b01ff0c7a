"""Constrained answers: compiles constraints, follows answers, and makes masks of the tokens that may come next."""
