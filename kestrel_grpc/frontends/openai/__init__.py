"""The part of OpenAI's API that a vision-language model can serve. Knows its own JSON and no other frontend."""
