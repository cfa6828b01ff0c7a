import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kestrel_client.v1 import generation_pb2 as _generation_pb2
from kestrel_client.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CaptionLength(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPTION_LENGTH_UNSPECIFIED: _ClassVar[CaptionLength]
    CAPTION_LENGTH_SHORT: _ClassVar[CaptionLength]
    CAPTION_LENGTH_NORMAL: _ClassVar[CaptionLength]
    CAPTION_LENGTH_LONG: _ClassVar[CaptionLength]

class MaskFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_FORMAT_UNSPECIFIED: _ClassVar[MaskFormat]
    MASK_FORMAT_SVG_PATH: _ClassVar[MaskFormat]
    MASK_FORMAT_POLYGON: _ClassVar[MaskFormat]
    MASK_FORMAT_RUN_LENGTH: _ClassVar[MaskFormat]
    MASK_FORMAT_PNG: _ClassVar[MaskFormat]

class EmbeddingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_TYPE_UNSPECIFIED: _ClassVar[EmbeddingType]
    EMBEDDING_TYPE_FLOAT16: _ClassVar[EmbeddingType]
    EMBEDDING_TYPE_FLOAT32: _ClassVar[EmbeddingType]

class ChatRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAT_ROLE_UNSPECIFIED: _ClassVar[ChatRole]
    CHAT_ROLE_SYSTEM: _ClassVar[ChatRole]
    CHAT_ROLE_USER: _ClassVar[ChatRole]
    CHAT_ROLE_ASSISTANT: _ClassVar[ChatRole]
CAPTION_LENGTH_UNSPECIFIED: CaptionLength
CAPTION_LENGTH_SHORT: CaptionLength
CAPTION_LENGTH_NORMAL: CaptionLength
CAPTION_LENGTH_LONG: CaptionLength
MASK_FORMAT_UNSPECIFIED: MaskFormat
MASK_FORMAT_SVG_PATH: MaskFormat
MASK_FORMAT_POLYGON: MaskFormat
MASK_FORMAT_RUN_LENGTH: MaskFormat
MASK_FORMAT_PNG: MaskFormat
EMBEDDING_TYPE_UNSPECIFIED: EmbeddingType
EMBEDDING_TYPE_FLOAT16: EmbeddingType
EMBEDDING_TYPE_FLOAT32: EmbeddingType
CHAT_ROLE_UNSPECIFIED: ChatRole
CHAT_ROLE_SYSTEM: ChatRole
CHAT_ROLE_USER: ChatRole
CHAT_ROLE_ASSISTANT: ChatRole

class QueryRequest(_message.Message):
    __slots__ = ("question", "image", "reasoning", "spatial_refs", "sampling", "options", "constraint")
    question: str
    image: _media_pb2.Image
    reasoning: bool
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    constraint: _generation_pb2.Constraint
    def __init__(self, question: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., reasoning: bool = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("started", "delta", "completed")
    started: _generation_pb2.StreamStarted
    delta: _generation_pb2.TextDelta
    completed: QueryResult
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.TextDelta, _Mapping]] = ..., completed: _Optional[_Union[QueryResult, _Mapping]] = ...) -> None: ...

class CompleteQueryRequest(_message.Message):
    __slots__ = ("question", "image", "reasoning", "spatial_refs", "sampling", "options", "constraint")
    question: str
    image: _media_pb2.Image
    reasoning: bool
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    constraint: _generation_pb2.Constraint
    def __init__(self, question: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., reasoning: bool = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ...) -> None: ...

class CompleteQueryResponse(_message.Message):
    __slots__ = ("result", "alternatives")
    result: QueryResult
    alternatives: _containers.RepeatedCompositeFieldContainer[QueryAlternative]
    def __init__(self, result: _Optional[_Union[QueryResult, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[QueryAlternative, _Mapping]]] = ...) -> None: ...

class QueryAlternative(_message.Message):
    __slots__ = ("answer", "reasoning", "logprobs", "finish_reason", "stop_sequence")
    answer: str
    reasoning: _generation_pb2.Reasoning
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    finish_reason: _generation_pb2.FinishReason
    stop_sequence: str
    def __init__(self, answer: _Optional[str] = ..., reasoning: _Optional[_Union[_generation_pb2.Reasoning, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_sequence: _Optional[str] = ...) -> None: ...

class QueryResult(_message.Message):
    __slots__ = ("answer", "reasoning", "logprobs", "info")
    answer: str
    reasoning: _generation_pb2.Reasoning
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    info: _generation_pb2.ResponseInfo
    def __init__(self, answer: _Optional[str] = ..., reasoning: _Optional[_Union[_generation_pb2.Reasoning, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class CaptionRequest(_message.Message):
    __slots__ = ("image", "length", "sampling", "options")
    image: _media_pb2.Image
    length: CaptionLength
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., length: _Optional[_Union[CaptionLength, str]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ...) -> None: ...

class CaptionResponse(_message.Message):
    __slots__ = ("started", "delta", "completed")
    started: _generation_pb2.StreamStarted
    delta: _generation_pb2.TextDelta
    completed: CaptionResult
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.TextDelta, _Mapping]] = ..., completed: _Optional[_Union[CaptionResult, _Mapping]] = ...) -> None: ...

class CompleteCaptionRequest(_message.Message):
    __slots__ = ("image", "length", "sampling", "options")
    image: _media_pb2.Image
    length: CaptionLength
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., length: _Optional[_Union[CaptionLength, str]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ...) -> None: ...

class CompleteCaptionResponse(_message.Message):
    __slots__ = ("result", "alternatives")
    result: CaptionResult
    alternatives: _containers.RepeatedCompositeFieldContainer[CaptionAlternative]
    def __init__(self, result: _Optional[_Union[CaptionResult, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[CaptionAlternative, _Mapping]]] = ...) -> None: ...

class CaptionAlternative(_message.Message):
    __slots__ = ("caption", "logprobs", "finish_reason", "stop_sequence")
    caption: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    finish_reason: _generation_pb2.FinishReason
    stop_sequence: str
    def __init__(self, caption: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_sequence: _Optional[str] = ...) -> None: ...

class CaptionResult(_message.Message):
    __slots__ = ("caption", "logprobs", "info")
    caption: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    info: _generation_pb2.ResponseInfo
    def __init__(self, caption: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class PointRequest(_message.Message):
    __slots__ = ("object", "image", "max_objects", "spatial_refs", "sampling", "options", "objects", "min_score")
    object: str
    image: _media_pb2.Image
    max_objects: int
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    objects: _containers.RepeatedScalarFieldContainer[str]
    min_score: float
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., max_objects: _Optional[int] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., objects: _Optional[_Iterable[str]] = ..., min_score: _Optional[float] = ...) -> None: ...

class ObjectError(_message.Message):
    __slots__ = ("code", "reason", "message")
    code: int
    reason: str
    message: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PointedObject(_message.Message):
    __slots__ = ("point", "score")
    point: _media_pb2.NormalizedPoint
    score: float
    def __init__(self, point: _Optional[_Union[_media_pb2.NormalizedPoint, _Mapping]] = ..., score: _Optional[float] = ...) -> None: ...

class PointGroup(_message.Message):
    __slots__ = ("object", "points", "finish_reason", "error", "objects")
    object: str
    points: _containers.RepeatedCompositeFieldContainer[_media_pb2.NormalizedPoint]
    finish_reason: _generation_pb2.FinishReason
    error: ObjectError
    objects: _containers.RepeatedCompositeFieldContainer[PointedObject]
    def __init__(self, object: _Optional[str] = ..., points: _Optional[_Iterable[_Union[_media_pb2.NormalizedPoint, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., error: _Optional[_Union[ObjectError, _Mapping]] = ..., objects: _Optional[_Iterable[_Union[PointedObject, _Mapping]]] = ...) -> None: ...

class DetectGroup(_message.Message):
    __slots__ = ("object", "objects", "finish_reason", "error")
    object: str
    objects: _containers.RepeatedCompositeFieldContainer[DetectedObject]
    finish_reason: _generation_pb2.FinishReason
    error: ObjectError
    def __init__(self, object: _Optional[str] = ..., objects: _Optional[_Iterable[_Union[DetectedObject, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., error: _Optional[_Union[ObjectError, _Mapping]] = ...) -> None: ...

class PointResponse(_message.Message):
    __slots__ = ("points", "groups", "objects", "info")
    points: _containers.RepeatedCompositeFieldContainer[_media_pb2.NormalizedPoint]
    groups: _containers.RepeatedCompositeFieldContainer[PointGroup]
    objects: _containers.RepeatedCompositeFieldContainer[PointedObject]
    info: _generation_pb2.ResponseInfo
    def __init__(self, points: _Optional[_Iterable[_Union[_media_pb2.NormalizedPoint, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[PointGroup, _Mapping]]] = ..., objects: _Optional[_Iterable[_Union[PointedObject, _Mapping]]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class StreamPointRequest(_message.Message):
    __slots__ = ("object", "image", "max_objects", "spatial_refs", "sampling", "options", "objects", "min_score")
    object: str
    image: _media_pb2.Image
    max_objects: int
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    objects: _containers.RepeatedScalarFieldContainer[str]
    min_score: float
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., max_objects: _Optional[int] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., objects: _Optional[_Iterable[str]] = ..., min_score: _Optional[float] = ...) -> None: ...

class StreamPointResponse(_message.Message):
    __slots__ = ("started", "found", "completed", "object_index")
    started: _generation_pb2.StreamStarted
    found: PointedObject
    completed: PointResponse
    object_index: int
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., found: _Optional[_Union[PointedObject, _Mapping]] = ..., completed: _Optional[_Union[PointResponse, _Mapping]] = ..., object_index: _Optional[int] = ...) -> None: ...

class DetectRequest(_message.Message):
    __slots__ = ("object", "image", "max_objects", "spatial_refs", "sampling", "options", "objects", "min_score")
    object: str
    image: _media_pb2.Image
    max_objects: int
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    objects: _containers.RepeatedScalarFieldContainer[str]
    min_score: float
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., max_objects: _Optional[int] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., objects: _Optional[_Iterable[str]] = ..., min_score: _Optional[float] = ...) -> None: ...

class DetectedObject(_message.Message):
    __slots__ = ("box", "score", "track_id")
    box: _media_pb2.NormalizedBox
    score: float
    track_id: int
    def __init__(self, box: _Optional[_Union[_media_pb2.NormalizedBox, _Mapping]] = ..., score: _Optional[float] = ..., track_id: _Optional[int] = ...) -> None: ...

class DetectResponse(_message.Message):
    __slots__ = ("objects", "groups", "info")
    objects: _containers.RepeatedCompositeFieldContainer[DetectedObject]
    groups: _containers.RepeatedCompositeFieldContainer[DetectGroup]
    info: _generation_pb2.ResponseInfo
    def __init__(self, objects: _Optional[_Iterable[_Union[DetectedObject, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[DetectGroup, _Mapping]]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class StreamDetectRequest(_message.Message):
    __slots__ = ("object", "image", "max_objects", "spatial_refs", "sampling", "options", "objects", "min_score")
    object: str
    image: _media_pb2.Image
    max_objects: int
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    objects: _containers.RepeatedScalarFieldContainer[str]
    min_score: float
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., max_objects: _Optional[int] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., objects: _Optional[_Iterable[str]] = ..., min_score: _Optional[float] = ...) -> None: ...

class StreamDetectResponse(_message.Message):
    __slots__ = ("started", "found", "completed", "object_index")
    started: _generation_pb2.StreamStarted
    found: DetectedObject
    completed: DetectResponse
    object_index: int
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., found: _Optional[_Union[DetectedObject, _Mapping]] = ..., completed: _Optional[_Union[DetectResponse, _Mapping]] = ..., object_index: _Optional[int] = ...) -> None: ...

class SegmentRequest(_message.Message):
    __slots__ = ("object", "image", "spatial_refs", "sampling", "options", "mask_format")
    object: str
    image: _media_pb2.Image
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    mask_format: MaskFormat
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., mask_format: _Optional[_Union[MaskFormat, str]] = ...) -> None: ...

class Polygon(_message.Message):
    __slots__ = ("points",)
    points: _containers.RepeatedCompositeFieldContainer[_media_pb2.NormalizedPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[_media_pb2.NormalizedPoint, _Mapping]]] = ...) -> None: ...

class RunLengthMask(_message.Message):
    __slots__ = ("width_px", "height_px", "counts")
    width_px: int
    height_px: int
    counts: str
    def __init__(self, width_px: _Optional[int] = ..., height_px: _Optional[int] = ..., counts: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("svg_path", "box", "is_partial", "polygons", "run_length", "png")
    svg_path: str
    box: _media_pb2.NormalizedBox
    is_partial: bool
    polygons: _containers.RepeatedCompositeFieldContainer[Polygon]
    run_length: RunLengthMask
    png: bytes
    def __init__(self, svg_path: _Optional[str] = ..., box: _Optional[_Union[_media_pb2.NormalizedBox, _Mapping]] = ..., is_partial: bool = ..., polygons: _Optional[_Iterable[_Union[Polygon, _Mapping]]] = ..., run_length: _Optional[_Union[RunLengthMask, _Mapping]] = ..., png: _Optional[bytes] = ...) -> None: ...

class SegmentResponse(_message.Message):
    __slots__ = ("segments", "info")
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    info: _generation_pb2.ResponseInfo
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class StreamSegmentRequest(_message.Message):
    __slots__ = ("object", "image", "spatial_refs", "sampling", "options", "mask_format")
    object: str
    image: _media_pb2.Image
    spatial_refs: _containers.RepeatedCompositeFieldContainer[_media_pb2.SpatialRef]
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    mask_format: MaskFormat
    def __init__(self, object: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., spatial_refs: _Optional[_Iterable[_Union[_media_pb2.SpatialRef, _Mapping]]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., mask_format: _Optional[_Union[MaskFormat, str]] = ...) -> None: ...

class PathDelta(_message.Message):
    __slots__ = ("text", "token_index", "token_count")
    text: str
    token_index: int
    token_count: int
    def __init__(self, text: _Optional[str] = ..., token_index: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class StreamSegmentResponse(_message.Message):
    __slots__ = ("started", "box", "path_delta", "completed")
    started: _generation_pb2.StreamStarted
    box: _media_pb2.NormalizedBox
    path_delta: PathDelta
    completed: SegmentResponse
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., box: _Optional[_Union[_media_pb2.NormalizedBox, _Mapping]] = ..., path_delta: _Optional[_Union[PathDelta, _Mapping]] = ..., completed: _Optional[_Union[SegmentResponse, _Mapping]] = ...) -> None: ...

class GazeRequest(_message.Message):
    __slots__ = ("image", "eye", "sampling", "options")
    image: _media_pb2.Image
    eye: _media_pb2.NormalizedPoint
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., eye: _Optional[_Union[_media_pb2.NormalizedPoint, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ...) -> None: ...

class GazeResponse(_message.Message):
    __slots__ = ("target", "info")
    target: _media_pb2.NormalizedPoint
    info: _generation_pb2.ResponseInfo
    def __init__(self, target: _Optional[_Union[_media_pb2.NormalizedPoint, _Mapping]] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class EmbedImageRequest(_message.Message):
    __slots__ = ("image", "normalize", "options")
    image: _media_pb2.Image
    normalize: bool
    options: _generation_pb2.RequestOptions
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., normalize: bool = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ...) -> None: ...

class EmbedImageResponse(_message.Message):
    __slots__ = ("mean", "patch_count", "info")
    mean: _containers.RepeatedScalarFieldContainer[float]
    patch_count: int
    info: _generation_pb2.ResponseInfo
    def __init__(self, mean: _Optional[_Iterable[float]] = ..., patch_count: _Optional[int] = ..., info: _Optional[_Union[_generation_pb2.ResponseInfo, _Mapping]] = ...) -> None: ...

class StreamEmbedImageRequest(_message.Message):
    __slots__ = ("image", "normalize", "options", "type")
    image: _media_pb2.Image
    normalize: bool
    options: _generation_pb2.RequestOptions
    type: EmbeddingType
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., normalize: bool = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., type: _Optional[_Union[EmbeddingType, str]] = ...) -> None: ...

class PatchEmbeddings(_message.Message):
    __slots__ = ("first_patch", "patch_count", "data")
    first_patch: int
    patch_count: int
    data: bytes
    def __init__(self, first_patch: _Optional[int] = ..., patch_count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class StreamEmbedImageResponse(_message.Message):
    __slots__ = ("started", "patches", "completed")
    started: _generation_pb2.StreamStarted
    patches: PatchEmbeddings
    completed: EmbedImageResponse
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., patches: _Optional[_Union[PatchEmbeddings, _Mapping]] = ..., completed: _Optional[_Union[EmbedImageResponse, _Mapping]] = ...) -> None: ...

class ChatPart(_message.Message):
    __slots__ = ("text", "image")
    text: str
    image: _media_pb2.Image
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts")
    role: ChatRole
    parts: _containers.RepeatedCompositeFieldContainer[ChatPart]
    def __init__(self, role: _Optional[_Union[ChatRole, str]] = ..., parts: _Optional[_Iterable[_Union[ChatPart, _Mapping]]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages", "reasoning", "sampling", "options", "constraint")
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    reasoning: bool
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    constraint: _generation_pb2.Constraint
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., reasoning: bool = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("started", "delta", "completed")
    started: _generation_pb2.StreamStarted
    delta: _generation_pb2.TextDelta
    completed: QueryResult
    def __init__(self, started: _Optional[_Union[_generation_pb2.StreamStarted, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.TextDelta, _Mapping]] = ..., completed: _Optional[_Union[QueryResult, _Mapping]] = ...) -> None: ...

class CompleteChatRequest(_message.Message):
    __slots__ = ("messages", "reasoning", "sampling", "options", "constraint")
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    reasoning: bool
    sampling: _generation_pb2.SamplingParams
    options: _generation_pb2.RequestOptions
    constraint: _generation_pb2.Constraint
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., reasoning: bool = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., options: _Optional[_Union[_generation_pb2.RequestOptions, _Mapping]] = ..., constraint: _Optional[_Union[_generation_pb2.Constraint, _Mapping]] = ...) -> None: ...

class CompleteChatResponse(_message.Message):
    __slots__ = ("result", "alternatives")
    result: QueryResult
    alternatives: _containers.RepeatedCompositeFieldContainer[QueryAlternative]
    def __init__(self, result: _Optional[_Union[QueryResult, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[QueryAlternative, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("image", "read_response_count")
    image: _media_pb2.Image
    read_response_count: int
    def __init__(self, image: _Optional[_Union[_media_pb2.Image, _Mapping]] = ..., read_response_count: _Optional[int] = ...) -> None: ...

class FrameError(_message.Message):
    __slots__ = ("code", "reason", "message")
    code: int
    reason: str
    message: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DetectFramesRequest(_message.Message):
    __slots__ = ("settings", "frame")
    settings: DetectFramesSettings
    frame: Frame
    def __init__(self, settings: _Optional[_Union[DetectFramesSettings, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class DetectFramesSettings(_message.Message):
    __slots__ = ("request", "every_frame", "track")
    request: DetectRequest
    every_frame: bool
    track: bool
    def __init__(self, request: _Optional[_Union[DetectRequest, _Mapping]] = ..., every_frame: bool = ..., track: bool = ...) -> None: ...

class DetectFramesResponse(_message.Message):
    __slots__ = ("frame_index", "dropped_frame_count", "waiting_duration", "result", "error")
    frame_index: int
    dropped_frame_count: int
    waiting_duration: _duration_pb2.Duration
    result: DetectResponse
    error: FrameError
    def __init__(self, frame_index: _Optional[int] = ..., dropped_frame_count: _Optional[int] = ..., waiting_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., result: _Optional[_Union[DetectResponse, _Mapping]] = ..., error: _Optional[_Union[FrameError, _Mapping]] = ...) -> None: ...

class PointFramesRequest(_message.Message):
    __slots__ = ("settings", "frame")
    settings: PointFramesSettings
    frame: Frame
    def __init__(self, settings: _Optional[_Union[PointFramesSettings, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class PointFramesSettings(_message.Message):
    __slots__ = ("request", "every_frame")
    request: PointRequest
    every_frame: bool
    def __init__(self, request: _Optional[_Union[PointRequest, _Mapping]] = ..., every_frame: bool = ...) -> None: ...

class PointFramesResponse(_message.Message):
    __slots__ = ("frame_index", "dropped_frame_count", "waiting_duration", "result", "error")
    frame_index: int
    dropped_frame_count: int
    waiting_duration: _duration_pb2.Duration
    result: PointResponse
    error: FrameError
    def __init__(self, frame_index: _Optional[int] = ..., dropped_frame_count: _Optional[int] = ..., waiting_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., result: _Optional[_Union[PointResponse, _Mapping]] = ..., error: _Optional[_Union[FrameError, _Mapping]] = ...) -> None: ...
