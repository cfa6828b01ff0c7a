#!/bin/sh
# llguidance 1.9.1 reads the decimals of JSON schemas one unit in the last place off: under the maximum
# 0.09999999999999999 it takes 0.1. And under a `$schema`
# of draft 4, where `const` does not exist, it ignores `const` without an error.
#
# Seen: "maximum 0.09999999999999999 takes 0.1: True", "draft 4 with const 5 takes 6: True".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import llguidance


class Bytes:
    """One token for each byte."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257)


def takes(schema, answer):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(answer)) == len(answer) and matcher.is_accepting()


rounded = takes({"type": "number", "maximum": 0.09999999999999999}, b"0.1")
ignored = takes({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, b"6")
print(f"llguidance {llguidance.__version__ if hasattr(llguidance, '__version__') else '1.9.1'}")
print(f"maximum 0.09999999999999999 takes 0.1: {rounded}")
print(f"draft 4 with const 5 takes 6: {ignored}")
sys.exit(not (rounded and ignored))
PYTHON
