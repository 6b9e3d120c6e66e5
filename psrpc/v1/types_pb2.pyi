from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_PLAIN: _ClassVar[Encoding]
    ENCODING_BFLOAT16: _ClassVar[Encoding]
    ENCODING_FLOAT16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_TOPK: _ClassVar[Encoding]
ENCODING_UNSPECIFIED: Encoding
ENCODING_PLAIN: Encoding
ENCODING_BFLOAT16: Encoding
ENCODING_FLOAT16: Encoding
ENCODING_INT8: Encoding
ENCODING_TOPK: Encoding

class Fence(_message.Message):
    __slots__ = ("generation", "policy", "plan_hash", "shard_incarnation", "session")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    SHARD_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    plan_hash: bytes
    shard_incarnation: int
    session: bytes
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., plan_hash: _Optional[bytes] = ..., shard_incarnation: _Optional[int] = ..., session: _Optional[bytes] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("worker", "certificate", "nonce")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    certificate: str
    nonce: bytes
    def __init__(self, worker: _Optional[str] = ..., certificate: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class BatchId(_message.Message):
    __slots__ = ("epoch", "first", "count")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first: int
    count: int
    def __init__(self, epoch: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("batch", "attempt", "grant")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    batch: BatchId
    attempt: int
    grant: bytes
    def __init__(self, batch: _Optional[_Union[BatchId, _Mapping]] = ..., attempt: _Optional[int] = ..., grant: _Optional[bytes] = ...) -> None: ...

class TableIds(_message.Message):
    __slots__ = ("table", "ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("arena", "nbytes", "encoding")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    arena: int
    nbytes: int
    encoding: Encoding
    def __init__(self, arena: _Optional[int] = ..., nbytes: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("arena", "offset", "data")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    arena: int
    offset: int
    data: bytes
    def __init__(self, arena: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("generation", "round", "attempts", "snapshots")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    round: int
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotOrder]
    def __init__(self, generation: _Optional[int] = ..., round: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotOrder, _Mapping]]] = ...) -> None: ...

class SignedDecision(_message.Message):
    __slots__ = ("decision", "signature")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    decision: bytes
    signature: bytes
    def __init__(self, decision: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ("name", "write", "keep", "directory", "global_step", "base", "parts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    write: bool
    keep: bool
    directory: str
    global_step: int
    base: str
    parts: int
    def __init__(self, name: _Optional[str] = ..., write: bool = ..., keep: bool = ..., directory: _Optional[str] = ..., global_step: _Optional[int] = ..., base: _Optional[str] = ..., parts: _Optional[int] = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("worker", "entry", "steps", "proof")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    worker: str
    entry: int
    steps: int
    proof: bytes
    def __init__(self, worker: _Optional[str] = ..., entry: _Optional[int] = ..., steps: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Interval(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class AppliedEpoch(_message.Message):
    __slots__ = ("epoch", "applied", "skipped", "totals")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    applied: _containers.RepeatedCompositeFieldContainer[Interval]
    skipped: _containers.RepeatedCompositeFieldContainer[Interval]
    totals: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, epoch: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., skipped: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., totals: _Optional[_Iterable[float]] = ...) -> None: ...

class EpochTotals(_message.Message):
    __slots__ = ("epoch", "records", "totals")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    records: int
    totals: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, epoch: _Optional[int] = ..., records: _Optional[int] = ..., totals: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerStaleness(_message.Message):
    __slots__ = ("worker", "counts")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...
