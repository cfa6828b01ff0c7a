import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UploadImageRequest(_message.Message):
    __slots__ = ("header", "chunk")
    header: UploadHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("sha256", "size_bytes", "ttl", "pin")
    sha256: str
    size_bytes: int
    ttl: _duration_pb2.Duration
    pin: bool
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pin: bool = ...) -> None: ...

class UploadImageResponse(_message.Message):
    __slots__ = ("image",)
    image: StoredImage
    def __init__(self, image: _Optional[_Union[StoredImage, _Mapping]] = ...) -> None: ...

class PutImageRequest(_message.Message):
    __slots__ = ("data", "sha256", "ttl", "pin")
    data: bytes
    sha256: str
    ttl: _duration_pb2.Duration
    pin: bool
    def __init__(self, data: _Optional[bytes] = ..., sha256: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pin: bool = ...) -> None: ...

class PutImageResponse(_message.Message):
    __slots__ = ("image",)
    image: StoredImage
    def __init__(self, image: _Optional[_Union[StoredImage, _Mapping]] = ...) -> None: ...

class GetImageRequest(_message.Message):
    __slots__ = ("image_id", "include_data")
    image_id: str
    include_data: bool
    def __init__(self, image_id: _Optional[str] = ..., include_data: bool = ...) -> None: ...

class GetImageResponse(_message.Message):
    __slots__ = ("image", "data")
    image: StoredImage
    data: bytes
    def __init__(self, image: _Optional[_Union[StoredImage, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DeleteImageRequest(_message.Message):
    __slots__ = ("image_id",)
    image_id: str
    def __init__(self, image_id: _Optional[str] = ...) -> None: ...

class DeleteImageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoredImage(_message.Message):
    __slots__ = ("image_id", "size_bytes", "media_type", "width_px", "height_px", "expire_time", "pinned")
    image_id: str
    size_bytes: int
    media_type: str
    width_px: int
    height_px: int
    expire_time: _timestamp_pb2.Timestamp
    pinned: bool
    def __init__(self, image_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., media_type: _Optional[str] = ..., width_px: _Optional[int] = ..., height_px: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pinned: bool = ...) -> None: ...
