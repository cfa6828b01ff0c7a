"""Divides scarce resources between tenants: open calls, memory, turns in a queue, rows and pages of a batch.

A tenant is a caller with a token of its own; callers without tokens are one tenant, "". Every limit that tenants
share uses one of these modules, in the server and in the engine. They import no torch.
"""
