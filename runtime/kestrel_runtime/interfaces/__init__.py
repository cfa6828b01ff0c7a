"""Protocols and plain types that engine, scheduling, execution and models share. No torch."""
