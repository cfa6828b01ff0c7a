"""Reads what every program in Python gets: addresses, tokens, the picture, and the name of the model."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

FACTS: dict[str, str] = json.loads(sys.argv[1])
TOKEN = FACTS["alice"]
BASE_URL = f"{FACTS['http']}/v1"
PICTURE = Path(FACTS["picture"]).read_bytes()
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
QUESTION = "What is in this image?"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
"""A schema of parameters that any model fills within a few tokens."""


def model_name() -> str:
    """Returns the name of the model that is served."""
    request = Request(f"{BASE_URL}/models", headers={"Authorization": f"Bearer {TOKEN}"})
    with urlopen(request) as response:
        return json.load(response)["data"][0]["id"]
