"""Converts to protobuf the parts that responses of `VisionService` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration

from kestrel_client.v1 import generation_pb2, media_pb2
from kestrel_runtime.api.events import (
    Box,
    Finished,
    FinishReason,
    Location,
    Reasoning,
    Started,
    TextChannel,
    TextDelta,
    Timing,
    TokenLogprob,
    Usage,
)

_FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
        FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
        FinishReason.MAX_OBJECTS: generation_pb2.FINISH_REASON_MAX_OBJECTS,
        FinishReason.STOP_SEQUENCE: generation_pb2.FINISH_REASON_STOP_SEQUENCE,
    }
)
_CHANNELS: Mapping[TextChannel, generation_pb2.TextChannel] = MappingProxyType(
    {
        TextChannel.ANSWER: generation_pb2.TEXT_CHANNEL_ANSWER,
        TextChannel.REASONING: generation_pb2.TEXT_CHANNEL_REASONING,
    }
)


def fill_delta(delta: generation_pb2.TextDelta, event: TextDelta) -> None:
    """Writes a piece of text into `delta`."""
    # Written in its place: making a message separately and copying it into its parent takes twice the time.
    delta.text = event.text
    delta.channel = _CHANNELS[event.channel]
    delta.token_index = event.token_index
    delta.token_count = event.num_tokens
    if event.logprobs:
        delta.logprobs.extend(logprobs(event.logprobs))


def started(event: Started, request_id: str, model: str) -> generation_pb2.StreamStarted:
    """Returns the first event of a stream."""
    return generation_pb2.StreamStarted(request_id=request_id, model=model, usage=_usage(event.usage))


def info(finished: Finished, request_id: str, model: str) -> generation_pb2.ResponseInfo:
    """Returns the fields that every result has about its request."""
    width_px, height_px = finished.image_size_px or (0, 0)
    return generation_pb2.ResponseInfo(
        request_id=request_id,
        model=model,
        finish_reason=finish_reason(finished),
        usage=_usage(finished.usage),
        timing=_timing(finished.timing),
        stop_sequence=finished.stop_sequence,
        image_width_px=width_px,
        image_height_px=height_px,
    )


def finish_reason(finished: Finished) -> generation_pb2.FinishReason:
    """Returns the reason for the end of the generation."""
    return _FINISH_REASONS[finished.finish_reason]


def reasoning(thought: Reasoning) -> generation_pb2.Reasoning:
    """Returns the reasoning before the answer."""
    return generation_pb2.Reasoning(
        text=thought.text,
        groundings=[
            generation_pb2.Grounding(
                start_char=grounding.start_char,
                end_char=grounding.end_char,
                points=points(grounding.points),
            )
            for grounding in thought.groundings
        ],
        logprobs=logprobs(thought.logprobs),
    )


def logprobs(tokens: Iterable[TokenLogprob] | None) -> list[generation_pb2.TokenLogprob]:
    """Returns the logprobs of tokens; none if the request asked for none."""
    return [
        generation_pb2.TokenLogprob(
            text=token.text,
            bytes=token.bytes,
            logprob=token.logprob,
            top=[
                generation_pb2.TopLogprob(text=top.text, bytes=top.bytes, logprob=top.logprob, token_id=top.id)
                for top in token.top
            ],
            token_id=token.id,
        )
        for token in tokens or ()
    ]


def points(locations: Iterable[Location]) -> list[media_pb2.NormalizedPoint]:
    """Returns positions in the image."""
    return [media_pb2.NormalizedPoint(x=location.x, y=location.y) for location in locations]


def region(box: Box) -> media_pb2.NormalizedBox:
    """Returns a region of the image."""
    return media_pb2.NormalizedBox(x_min=box.x_min, y_min=box.y_min, x_max=box.x_max, y_max=box.y_max)


def _usage(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        input_token_count=usage.num_input_tokens,
        output_token_count=usage.num_output_tokens,
        cached_token_count=usage.num_cached_tokens,
        image_token_count=usage.num_image_tokens,
    )


def _timing(timing: Timing) -> generation_pb2.Timing:
    return generation_pb2.Timing(
        queue_duration=_duration(timing.queue_s),
        preprocess_duration=_duration(timing.preprocess_s),
        prefill_duration=_duration(timing.prefill_s),
        time_to_first_token=_duration(timing.time_to_first_token_s),
        decode_duration=_duration(timing.decode_s),
    )


def _duration(duration_s: float) -> Duration:
    seconds, nanos = divmod(round(duration_s * 1e9), 10**9)
    return Duration(seconds=seconds, nanos=nanos)
