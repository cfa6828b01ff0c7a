from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PixelFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIXEL_FORMAT_UNSPECIFIED: _ClassVar[PixelFormat]
    PIXEL_FORMAT_RGB8: _ClassVar[PixelFormat]
    PIXEL_FORMAT_BGR8: _ClassVar[PixelFormat]
    PIXEL_FORMAT_RGBA8: _ClassVar[PixelFormat]
    PIXEL_FORMAT_GRAY8: _ClassVar[PixelFormat]
PIXEL_FORMAT_UNSPECIFIED: PixelFormat
PIXEL_FORMAT_RGB8: PixelFormat
PIXEL_FORMAT_BGR8: PixelFormat
PIXEL_FORMAT_RGBA8: PixelFormat
PIXEL_FORMAT_GRAY8: PixelFormat

class Image(_message.Message):
    __slots__ = ("data", "image_id", "uri", "raw")
    data: bytes
    image_id: str
    uri: str
    raw: RawImage
    def __init__(self, data: _Optional[bytes] = ..., image_id: _Optional[str] = ..., uri: _Optional[str] = ..., raw: _Optional[_Union[RawImage, _Mapping]] = ...) -> None: ...

class RawImage(_message.Message):
    __slots__ = ("pixels", "width_px", "height_px", "format", "row_stride_bytes")
    pixels: bytes
    width_px: int
    height_px: int
    format: PixelFormat
    row_stride_bytes: int
    def __init__(self, pixels: _Optional[bytes] = ..., width_px: _Optional[int] = ..., height_px: _Optional[int] = ..., format: _Optional[_Union[PixelFormat, str]] = ..., row_stride_bytes: _Optional[int] = ...) -> None: ...

class NormalizedPoint(_message.Message):
    __slots__ = ("x", "y")
    x: float
    y: float
    def __init__(self, x: _Optional[float] = ..., y: _Optional[float] = ...) -> None: ...

class NormalizedBox(_message.Message):
    __slots__ = ("x_min", "y_min", "x_max", "y_max")
    x_min: float
    y_min: float
    x_max: float
    y_max: float
    def __init__(self, x_min: _Optional[float] = ..., y_min: _Optional[float] = ..., x_max: _Optional[float] = ..., y_max: _Optional[float] = ...) -> None: ...

class SpatialRef(_message.Message):
    __slots__ = ("point", "box")
    point: NormalizedPoint
    box: NormalizedBox
    def __init__(self, point: _Optional[_Union[NormalizedPoint, _Mapping]] = ..., box: _Optional[_Union[NormalizedBox, _Mapping]] = ...) -> None: ...
