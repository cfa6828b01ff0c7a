"""The examples in other languages, run against a server of ours."""
