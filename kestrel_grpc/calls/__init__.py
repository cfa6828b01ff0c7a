"""Serves one call of any transport: context, admission, message, submission to the engine, errors and their
statuses."""
