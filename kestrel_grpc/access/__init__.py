"""Who may call: tokens, scopes, rate limits and TLS certificates."""
