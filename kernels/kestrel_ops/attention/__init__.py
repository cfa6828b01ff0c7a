"""Attends to patches of crops and to cached tokens; rotates queries and keys; writes keys and values to pages."""
