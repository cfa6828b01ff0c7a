"""Scores a model on published sets: reads their files, makes the calls' requests, and scores the answers.

Nothing here calls a server: a `Task` returns its calls and takes their answers. `kestrel-grpc evaluate` sends them.
"""
