"""The tokens of answers, which an engine in the same process does not tell: only what they mean."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from bench.harness.wrapping import Method, wrapped
from kestrel_runtime.execution.step_runner import StepRunner
from kestrel_runtime.scheduling.output_parser import Token
from kestrel_runtime.scheduling.sequence import Sequence


@contextlib.contextmanager
def noted_tokens() -> Iterator[dict[int, list[Token]]]:
    """Until the block ends, what every request has generated, by its seed, before its stream tells its end.

    The caller gives each request a different seed, and removes the entries that it has read.
    """
    tokens: dict[int, list[Token]] = {}

    def noting(release: Method) -> Method:
        @functools.wraps(release)
        def note(runner: StepRunner, sequence: Sequence) -> None:
            tokens[sequence.seed] = sequence.tokens[sequence.num_prompt_tokens :]
            release(runner, sequence)

        return note

    with wrapped(StepRunner, "release", noting):
        yield tokens
