"""Metrics, traces and logs, and the HTTP port that serves metrics and probes."""
