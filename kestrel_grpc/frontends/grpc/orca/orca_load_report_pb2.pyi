from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OrcaLoadReport(_message.Message):
    __slots__ = ("cpu_utilization", "rps_fractional", "named_metrics", "application_utilization")
    class NamedMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    cpu_utilization: float
    rps_fractional: float
    named_metrics: _containers.ScalarMap[str, float]
    application_utilization: float
    def __init__(self, cpu_utilization: _Optional[float] = ..., rps_fractional: _Optional[float] = ..., named_metrics: _Optional[_Mapping[str, float]] = ..., application_utilization: _Optional[float] = ...) -> None: ...
