import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kestrel_client.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]

class CachePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_POLICY_UNSPECIFIED: _ClassVar[CachePolicy]
    CACHE_POLICY_USE: _ClassVar[CachePolicy]
    CACHE_POLICY_REFRESH: _ClassVar[CachePolicy]
    CACHE_POLICY_BYPASS: _ClassVar[CachePolicy]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_MAX_OBJECTS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]

class TextChannel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT_CHANNEL_UNSPECIFIED: _ClassVar[TextChannel]
    TEXT_CHANNEL_ANSWER: _ClassVar[TextChannel]
    TEXT_CHANNEL_REASONING: _ClassVar[TextChannel]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_NORMAL: Priority
PRIORITY_BATCH: Priority
CACHE_POLICY_UNSPECIFIED: CachePolicy
CACHE_POLICY_USE: CachePolicy
CACHE_POLICY_REFRESH: CachePolicy
CACHE_POLICY_BYPASS: CachePolicy
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_MAX_OBJECTS: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
TEXT_CHANNEL_UNSPECIFIED: TextChannel
TEXT_CHANNEL_ANSWER: TextChannel
TEXT_CHANNEL_REASONING: TextChannel

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "max_tokens", "seed", "stop", "include_stop", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "n")
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    n: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: bool = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("choices", "regex", "json_schema")
    choices: Choices
    regex: str
    json_schema: str
    def __init__(self, choices: _Optional[_Union[Choices, _Mapping]] = ..., regex: _Optional[str] = ..., json_schema: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("values",)
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class RequestOptions(_message.Message):
    __slots__ = ("model", "adapter", "priority", "cache", "max_queue_duration")
    model: str
    adapter: str
    priority: Priority
    cache: CachePolicy
    max_queue_duration: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., cache: _Optional[_Union[CachePolicy, str]] = ..., max_queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("input_token_count", "output_token_count", "cached_token_count", "image_token_count")
    input_token_count: int
    output_token_count: int
    cached_token_count: int
    image_token_count: int
    def __init__(self, input_token_count: _Optional[int] = ..., output_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., image_token_count: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_duration", "preprocess_duration", "prefill_duration", "time_to_first_token", "decode_duration")
    queue_duration: _duration_pb2.Duration
    preprocess_duration: _duration_pb2.Duration
    prefill_duration: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    decode_duration: _duration_pb2.Duration
    def __init__(self, queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., preprocess_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResponseInfo(_message.Message):
    __slots__ = ("request_id", "model", "finish_reason", "usage", "timing", "stop_sequence", "image_width_px", "image_height_px")
    request_id: str
    model: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str
    image_width_px: int
    image_height_px: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., stop_sequence: _Optional[str] = ..., image_width_px: _Optional[int] = ..., image_height_px: _Optional[int] = ...) -> None: ...

class StreamStarted(_message.Message):
    __slots__ = ("request_id", "model", "usage")
    request_id: str
    model: str
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class TextDelta(_message.Message):
    __slots__ = ("text", "channel", "token_index", "token_count", "logprobs")
    text: str
    channel: TextChannel
    token_index: int
    token_count: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., channel: _Optional[_Union[TextChannel, str]] = ..., token_index: _Optional[int] = ..., token_count: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("text", "bytes", "logprob", "top", "token_id")
    text: str
    bytes: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    token_id: int
    def __init__(self, text: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., token_id: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("text", "bytes", "logprob", "token_id")
    text: str
    bytes: bytes
    logprob: float
    token_id: int
    def __init__(self, text: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ..., token_id: _Optional[int] = ...) -> None: ...

class Grounding(_message.Message):
    __slots__ = ("start_char", "end_char", "points")
    start_char: int
    end_char: int
    points: _containers.RepeatedCompositeFieldContainer[_media_pb2.NormalizedPoint]
    def __init__(self, start_char: _Optional[int] = ..., end_char: _Optional[int] = ..., points: _Optional[_Iterable[_Union[_media_pb2.NormalizedPoint, _Mapping]]] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("text", "groundings", "logprobs")
    text: str
    groundings: _containers.RepeatedCompositeFieldContainer[Grounding]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., groundings: _Optional[_Iterable[_Union[Grounding, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...
