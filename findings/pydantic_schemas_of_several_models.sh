#!/bin/sh
# pydantic 2.14.4 lists types in the schema of several models that none of them refers to: the type that a
# `PlainValidator` returns is in `$defs` of `models_json_schema` though `WithJsonSchema` replaces it, and is absent
# from `model_json_schema` of the same model. An OpenAPI document that is made of it describes a form that no field takes.
#
# Seen: "one model: []", "several models: ['Body', 'Choice']".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pydantic==2.14.4
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from typing import Annotated, NamedTuple

import pydantic
from pydantic import BaseModel, PlainValidator, WithJsonSchema
from pydantic.json_schema import models_json_schema


class Choice(NamedTuple):
    name: str


class Body(BaseModel):
    choice: Annotated[Choice, PlainValidator(Choice), WithJsonSchema({"type": "string"})]


alone = sorted(Body.model_json_schema().get("$defs", {}))
several = sorted(models_json_schema([(Body, "validation")])[1]["$defs"])
print(f"pydantic {pydantic.VERSION}\none model: {alone}\nseveral models: {several}")
sys.exit(not (alone == [] and several == ["Body", "Choice"]))
PYTHON
