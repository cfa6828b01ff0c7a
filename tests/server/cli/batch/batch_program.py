"""`kestrel-grpc batch` as a program with a fake engine in place of the model.

Answers repeat the question and the seed. With HOLDS in the environment, a question that ends with "kill me" has a
line printed on standard output and is not answered; with SIGNALS the program gets SIGTERM at a question that ends
with "stop me".
"""

import os
import signal
import sys
from collections.abc import Iterable
from types import ModuleType

from kestrel_grpc.__main__ import main
from kestrel_runtime.api.events import Finished, FinishReason, QueryOutput, Usage
from kestrel_runtime.api.requests import Query, Request
from tests.fakes import HOLD, TIMING, FakeEngine


def script(request: Request) -> Iterable[object]:
    assert isinstance(request, Query)
    if request.question.endswith("kill me") and "HOLDS" in os.environ:
        print("held", flush=True)
        return [HOLD]
    if request.question.endswith("stop me") and "SIGNALS" in os.environ:
        signal.raise_signal(signal.SIGTERM)
    output = QueryOutput(f"{request.question} with {request.sampling.seed}", None)
    return [Finished(output, FinishReason.STOP, Usage(3, 0, 2), TIMING)]


class _Engine(FakeEngine):
    has_ended = True


async def _warm_up(engine: FakeEngine) -> None:
    """There is nothing to warm up."""


class _WarmUpFailed(Exception):
    pass


def _replace_engine() -> None:
    """In place of the modules that import torch."""
    engine, warm_up = ModuleType("kestrel_runtime.engine.engine"), ModuleType("kestrel_runtime.engine.warm_up")
    vars(engine)["LocalEngine"] = type("LocalEngine", (), {"start": staticmethod(lambda config: _Engine(script))})
    vars(warm_up).update(warm_up=_warm_up, WarmUpFailed=_WarmUpFailed)
    sys.modules.update({module.__name__: module for module in (engine, warm_up)})


if __name__ == "__main__":
    _replace_engine()
    sys.exit(main(["batch", *sys.argv[1:]]))
