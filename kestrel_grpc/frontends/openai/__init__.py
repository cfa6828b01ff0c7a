"""Serves the part of OpenAI's API that a vision-language model can. Knows its own JSON and no other frontend."""
