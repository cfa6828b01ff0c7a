"""Several processes that serve one port: the supervisor, its front ends, its engine cores, and what joins them."""
