"""What all frontends share: the context of a call, the table of errors, limits."""
