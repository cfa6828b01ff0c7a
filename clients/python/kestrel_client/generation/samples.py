"""Further samples of an answer or a caption, and how they are read from messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kestrel_client.generation.finish_reason import FinishReason, finish_reason
from kestrel_client.generation.logprobs import TokenLogprob, token_logprobs
from kestrel_client.results import CaptionResult, QueryResult, Reasoning, caption_result, query_result, reasoning_of
from kestrel_client.v1 import vision_service_pb2


@dataclass(frozen=True, slots=True)
class QueryAlternative:
    """A further sample of an answer."""

    answer: str
    reasoning: Reasoning | None
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True)
class CaptionAlternative:
    """A further sample of a description."""

    caption: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_sequence: str | None


def complete_query(message: vision_service_pb2.CompleteQueryResponse) -> QueryResult:
    """An answer and its alternatives, read."""
    alternatives = tuple(
        QueryAlternative(
            item.answer,
            reasoning_of(item.reasoning) if item.HasField("reasoning") else None,
            token_logprobs(item.logprobs),
            finish_reason(item.finish_reason),
            item.stop_sequence or None,
        )
        for item in message.alternatives
    )
    return replace(query_result(message.result), alternatives=alternatives)


def complete_caption(message: vision_service_pb2.CompleteCaptionResponse) -> CaptionResult:
    """A description and its alternatives, read."""
    alternatives = tuple(
        CaptionAlternative(
            item.caption,
            token_logprobs(item.logprobs),
            finish_reason(item.finish_reason),
            item.stop_sequence or None,
        )
        for item in message.alternatives
    )
    return replace(caption_result(message.result), alternatives=alternatives)
