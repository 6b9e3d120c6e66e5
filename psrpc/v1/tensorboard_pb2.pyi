from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorBoardEvent(_message.Message):
    __slots__ = ("wall_time", "step", "file_version", "summary")
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    wall_time: float
    step: int
    file_version: str
    summary: TensorBoardSummary
    def __init__(self, wall_time: _Optional[float] = ..., step: _Optional[int] = ..., file_version: _Optional[str] = ..., summary: _Optional[_Union[TensorBoardSummary, _Mapping]] = ...) -> None: ...

class TensorBoardSummary(_message.Message):
    __slots__ = ("value",)
    class PluginData(_message.Message):
        __slots__ = ("plugin_name", "content")
        PLUGIN_NAME_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        plugin_name: str
        content: bytes
        def __init__(self, plugin_name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...
    class Metadata(_message.Message):
        __slots__ = ("plugin_data",)
        PLUGIN_DATA_FIELD_NUMBER: _ClassVar[int]
        plugin_data: TensorBoardSummary.PluginData
        def __init__(self, plugin_data: _Optional[_Union[TensorBoardSummary.PluginData, _Mapping]] = ...) -> None: ...
    class Strings(_message.Message):
        __slots__ = ("dtype", "string_val")
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        STRING_VAL_FIELD_NUMBER: _ClassVar[int]
        dtype: int
        string_val: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, dtype: _Optional[int] = ..., string_val: _Optional[_Iterable[bytes]] = ...) -> None: ...
    class Histogram(_message.Message):
        __slots__ = ("min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket")
        MIN_FIELD_NUMBER: _ClassVar[int]
        MAX_FIELD_NUMBER: _ClassVar[int]
        NUM_FIELD_NUMBER: _ClassVar[int]
        SUM_FIELD_NUMBER: _ClassVar[int]
        SUM_SQUARES_FIELD_NUMBER: _ClassVar[int]
        BUCKET_LIMIT_FIELD_NUMBER: _ClassVar[int]
        BUCKET_FIELD_NUMBER: _ClassVar[int]
        min: float
        max: float
        num: float
        sum: float
        sum_squares: float
        bucket_limit: _containers.RepeatedScalarFieldContainer[float]
        bucket: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ..., num: _Optional[float] = ..., sum: _Optional[float] = ..., sum_squares: _Optional[float] = ..., bucket_limit: _Optional[_Iterable[float]] = ..., bucket: _Optional[_Iterable[float]] = ...) -> None: ...
    class Value(_message.Message):
        __slots__ = ("tag", "metadata", "simple_value", "histo", "tensor")
        TAG_FIELD_NUMBER: _ClassVar[int]
        METADATA_FIELD_NUMBER: _ClassVar[int]
        SIMPLE_VALUE_FIELD_NUMBER: _ClassVar[int]
        HISTO_FIELD_NUMBER: _ClassVar[int]
        TENSOR_FIELD_NUMBER: _ClassVar[int]
        tag: str
        metadata: TensorBoardSummary.Metadata
        simple_value: float
        histo: TensorBoardSummary.Histogram
        tensor: TensorBoardSummary.Strings
        def __init__(self, tag: _Optional[str] = ..., metadata: _Optional[_Union[TensorBoardSummary.Metadata, _Mapping]] = ..., simple_value: _Optional[float] = ..., histo: _Optional[_Union[TensorBoardSummary.Histogram, _Mapping]] = ..., tensor: _Optional[_Union[TensorBoardSummary.Strings, _Mapping]] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedCompositeFieldContainer[TensorBoardSummary.Value]
    def __init__(self, value: _Optional[_Iterable[_Union[TensorBoardSummary.Value, _Mapping]]] = ...) -> None: ...

class TensorBoardHparams(_message.Message):
    __slots__ = ("version", "session_start_info")
    class SessionStart(_message.Message):
        __slots__ = ("hparams",)
        class HparamsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: _struct_pb2.Value
            def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...
        HPARAMS_FIELD_NUMBER: _ClassVar[int]
        hparams: _containers.MessageMap[str, _struct_pb2.Value]
        def __init__(self, hparams: _Optional[_Mapping[str, _struct_pb2.Value]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_START_INFO_FIELD_NUMBER: _ClassVar[int]
    version: int
    session_start_info: TensorBoardHparams.SessionStart
    def __init__(self, version: _Optional[int] = ..., session_start_info: _Optional[_Union[TensorBoardHparams.SessionStart, _Mapping]] = ...) -> None: ...
