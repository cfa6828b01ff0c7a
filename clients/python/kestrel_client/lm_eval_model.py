"""Adds a model to lm-evaluation-harness (the package `lm_eval`), whose tasks then ask a server. Needs `lm_eval`.

Importing this module registers the model as `kestrel-grpc`. `python -m kestrel_client.lm_eval_model` is the command
`lm_eval` with this model among its models; `lm_eval.simple_evaluate(model=KestrelModel(…), …)` takes it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn

from lm_eval.api.model import LM  # an extra, and large
from lm_eval.api.registry import register_model  # the same

from kestrel_client.batches import DEFAULT_CONCURRENCY, Job
from kestrel_client.client import Client
from kestrel_client.connection import DEFAULT_TIMEOUT_S
from kestrel_client.results import QueryResult

_PLACEHOLDER = "<image>"
_KNOWN = frozenset(("until", "max_gen_toks", "max_tokens", "max_new_tokens", "temperature", "top_p", "do_sample"))


@register_model("kestrel-grpc")
class KestrelModel(LM):
    """Answers `generate_until` requests, each with one image or none, by calls of `CompleteQuery`.

    Args:
        address: Where the server is, as `Client` takes it.
        token: Sent with every call.
        model: A name from `list_models()`; None for the model served.
        adapter: An adapter of the model, as `name` or `name@step`.
        reasoning: Whether the model reasons before it answers.
        timeout_s: The longest time for each call, in seconds.
        batch_size: How many calls run at a time.
        device, max_batch_size: Given by the harness, and not used: they belong to the server.
    """

    MULTIMODAL = True
    """True: the harness may send requests with images."""

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        model: str | None = None,
        adapter: str | None = None,
        reasoning: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        batch_size: int | str | None = None,
        device: object = None,
        max_batch_size: object = None,
    ) -> None:
        super().__init__()
        self._client = Client(address, token=token, timeout_s=timeout_s)
        number = str(batch_size)  # may also be "auto"
        self._concurrency = int(number) if number.isdecimal() else DEFAULT_CONCURRENCY
        given = {"model": model, "adapter": adapter}
        self._options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._options["reasoning"] = reasoning

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers, in the order of the requests.

        Raises `ValueError` for a request with several images or with a setting that the server does not have, and
        the error of the first call that fails.
        """
        answers: list[str] = []
        jobs = [self._job(*request.args) for request in requests]
        with closing(self._client.map(jobs, concurrency=self._concurrency)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
                assert isinstance(outcome.result, QueryResult)
                answers.append(outcome.result.answer)
        return answers

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> NoReturn:
        """Raises `NotImplementedError`: a server returns the likelihood of its own answer only."""
        raise NotImplementedError(
            "kestrel-grpc answers generate_until tasks only; it computes no likelihood of a text"
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> NoReturn:
        """Raises `NotImplementedError`, as `loglikelihood`."""
        self.loglikelihood(requests)

    def _job(self, context: str, settings: Mapping[str, Any], media: Mapping[str, Any] | None = None) -> Job:
        images = list((media or {}).get("visual") or ())
        if len(images) > 1:
            raise ValueError(f"a question has {len(images)} images; the model takes one")
        unknown = settings.keys() - _KNOWN
        if unknown:
            raise ValueError(f"the server has no setting {', '.join(sorted(unknown))}")
        question = context.replace(_PLACEHOLDER, "").strip()
        image = images[0] if images else None
        return Job("query", image, question, **self._options, **_sampling(settings))


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a call for the settings of a task."""
    options: dict[str, Any] = {"temperature": float(settings.get("temperature") or 0.0)}
    if settings.get("do_sample") is False:
        options["temperature"] = 0.0
    if settings.get("top_p") is not None:
        options["top_p"] = float(settings["top_p"])
    until = settings.get("until") or ()
    stop = [text for text in ([until] if isinstance(until, str) else until) if text]
    if stop:
        options["stop"] = stop
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        if settings.get(name) is not None:
            options["max_tokens"] = int(settings[name])
    return options


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # the same

    cli_evaluate()
