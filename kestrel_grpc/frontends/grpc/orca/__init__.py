"""Generated messages of `proto/compat/xds`."""
