"""Events for the caller after each token of a sequence. Knows parsers, usage and timing; knows no streams."""

from __future__ import annotations

from kestrel_runtime.api.events import Event, Finished, Started, Timing, Usage
from kestrel_runtime.scheduling.sequence import Sequence


def events_after(sequence: Sequence, now: float) -> list[Event]:
    """Have the sequence's parser consume its newest token; returns what the caller is to be told.

    Ends the answer where the context is full. Raises what the parser raises.
    """
    parser = sequence.parser
    events: list[Event] = list(parser.consume(sequence.tokens[-1]))
    if sequence.clock.first_token is None:
        sequence.clock.first_token = now
        events.insert(0, Started(_usage(sequence)))
    if parser.finish_reason is None and sequence.is_full:
        events += parser.truncate()
    if parser.finish_reason is not None:
        timing = _timing(sequence, now)
        usage = _usage(sequence)
        ending = parser.finish_reason, usage, timing, parser.stop_sequence, sequence.image_size_px
        events.append(Finished(parser.output(), *ending))
    return events


def _usage(sequence: Sequence) -> Usage:
    num_cached = sequence.num_cached_prompt or 0
    return Usage(sequence.num_prompt_positions, sequence.num_image_tokens, sequence.num_generated, num_cached)


def _timing(sequence: Sequence, now: float) -> Timing:
    clock = sequence.clock
    moments = (clock.preprocess_started, clock.prepared, clock.admitted, clock.first_token)
    started, prepared, admitted, first_token = (now if moment is None else moment for moment in moments)
    return Timing(
        queue_s=(started - clock.submitted) + (admitted - prepared),
        preprocess_s=prepared - started,
        prefill_s=first_token - admitted,
        time_to_first_token_s=first_token - clock.submitted,
        decode_s=now - first_token,
    )
