"""Several servers behind a balancer, as processes that can be killed and stopped."""
