"""Each operation in plain torch: the definition of right, on any device."""
