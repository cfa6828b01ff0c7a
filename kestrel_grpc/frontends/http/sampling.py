"""Settings of sampling that REST and OpenAI's API name alike: their fields, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel_grpc.frontends.http.fields import Field, Kind
from kestrel_runtime.api.errors import Violation
from kestrel_runtime.api.sampling_params import MAX_STOPS

FIELDS = (
    Field("stop", Kind.TEXT_OR_LIST, f"Strings that end the text, at most {MAX_STOPS}; or a single one."),
    Field("include_stop", Kind.BOOLEAN, "Whether the text ends behind the stop string instead of before it."),
    Field("top_k", Kind.INTEGER, "How many of the most likely tokens are sampled from."),
    Field("min_p", Kind.NUMBER, "Least probability of a token, as a share of that of the most likely one."),
    Field("repetition_penalty", Kind.NUMBER, "Divides logits of tokens in the prompt or the text; 0.1 to 10."),
    Field("presence_penalty", Kind.NUMBER, "Is subtracted from logits of tokens in the text; -2 to 2."),
    Field("frequency_penalty", Kind.NUMBER, "Is subtracted each time that the text has the token; -2 to 2."),
    Field("logit_bias", Kind.OBJECT, "By the ids of tokens, what is added to their logits; -100 to 100."),
    Field("n", Kind.INTEGER, "How many samples to draw, 1 to 16; in a stream of the REST API 1."),
)
_MAX_ID_CHARS = 10


def read_sampling(values: Mapping[str, Any], violations: list[Violation], path: str = "") -> dict[str, Any]:
    """Arguments of `SamplingParams`, from the values of `FIELDS`. `path` stands before names in `violations`."""
    return {
        "stop": _stops(values.get("stop", ()), violations, f"{path}stop"),
        "include_stop": values.get("include_stop", False),
        "logit_bias": _biases(values.get("logit_bias", {}), violations, f"{path}logit_bias"),
        **{
            name: values.get(name)
            for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n")
        },
    }


def _stops(given: Any, violations: list[Violation], path: str) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    # More of them are refused by their number, without a look at each.
    for index, stop in enumerate(stops[: MAX_STOPS + 1]):
        if not isinstance(stop, str):
            violations.append(Violation(f"{path}[{index}]", "must be a text"))
    return tuple(stop if isinstance(stop, str) else "?" for stop in stops[: MAX_STOPS + 1])


def _biases(given: Mapping[str, Any], violations: list[Violation], path: str) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for name, bias in given.items():
        shown = name[:_MAX_ID_CHARS]
        if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_ID_CHARS):
            violations.append(Violation(f"{path}[{shown}]", "is not the id of a token"))
        elif isinstance(bias, bool) or not isinstance(bias, int | float):
            violations.append(Violation(f"{path}[{shown}]", "must be a number"))
        else:
            found[int(name)] = bias
    return tuple(sorted(found.items()))
