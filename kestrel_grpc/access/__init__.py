"""Decides who may call, by tokens, scopes, rate limits and TLS certificates."""
