"""Scores of a model on published sets: reads their files, says what to ask, and scores the answers.

Nothing here calls a server: a `Task` gives its calls and takes their answers. `kestrel-grpc evaluate` calls.
"""
