from psrpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_OUTCOME_UNSPECIFIED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_APPLIED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_ALREADY_APPLIED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_STAGED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_SKIPPED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_TOO_STALE: _ClassVar[PushOutcome]
    PUSH_OUTCOME_ONE_BY_ONE: _ClassVar[PushOutcome]
PUSH_OUTCOME_UNSPECIFIED: PushOutcome
PUSH_OUTCOME_APPLIED: PushOutcome
PUSH_OUTCOME_ALREADY_APPLIED: PushOutcome
PUSH_OUTCOME_STAGED: PushOutcome
PUSH_OUTCOME_SKIPPED: PushOutcome
PUSH_OUTCOME_TOO_STALE: PushOutcome
PUSH_OUTCOME_ONE_BY_ONE: PushOutcome

class InitializeHeader(_message.Message):
    __slots__ = ("fence", "extents", "grant")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    extents: _containers.RepeatedCompositeFieldContainer[_types_pb2.Extent]
    grant: bytes
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., extents: _Optional[_Iterable[_Union[_types_pb2.Extent, _Mapping]]] = ..., grant: _Optional[bytes] = ...) -> None: ...

class InitializeRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: InitializeHeader
    chunk: _types_pb2.Chunk
    def __init__(self, header: _Optional[_Union[InitializeHeader, _Mapping]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ...) -> None: ...

class InitializeResponse(_message.Message):
    __slots__ = ("version", "already")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALREADY_FIELD_NUMBER: _ClassVar[int]
    version: int
    already: bool
    def __init__(self, version: _Optional[int] = ..., already: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("fence", "newest", "round", "snapshot", "encoding", "rows", "rows_only", "decision", "staged", "clock")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_ONLY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    newest: bool
    round: int
    snapshot: str
    encoding: _types_pb2.Encoding
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.TableIds]
    rows_only: bool
    decision: _types_pb2.SignedDecision
    staged: _containers.RepeatedCompositeFieldContainer[StagedEverywhere]
    clock: _types_pb2.WorkerClock
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., newest: bool = ..., round: _Optional[int] = ..., snapshot: _Optional[str] = ..., encoding: _Optional[_Union[_types_pb2.Encoding, str]] = ..., rows: _Optional[_Iterable[_Union[_types_pb2.TableIds, _Mapping]]] = ..., rows_only: bool = ..., decision: _Optional[_Union[_types_pb2.SignedDecision, _Mapping]] = ..., staged: _Optional[_Iterable[_Union[StagedEverywhere, _Mapping]]] = ..., clock: _Optional[_Union[_types_pb2.WorkerClock, _Mapping]] = ...) -> None: ...

class StagedEverywhere(_message.Message):
    __slots__ = ("batch", "attempt", "receipts")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    batch: _types_pb2.BatchId
    attempt: int
    receipts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, batch: _Optional[_Union[_types_pb2.BatchId, _Mapping]] = ..., attempt: _Optional[int] = ..., receipts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("version", "generation", "extents")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    generation: int
    extents: _containers.RepeatedCompositeFieldContainer[_types_pb2.Extent]
    def __init__(self, version: _Optional[int] = ..., generation: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[_types_pb2.Extent, _Mapping]]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    chunk: _types_pb2.Chunk
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("fence", "batch", "attempt", "base_version", "examples", "skipped", "extents", "rows", "totals", "grant", "summed")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    fence: _types_pb2.Fence
    batch: _types_pb2.BatchId
    attempt: int
    base_version: int
    examples: int
    skipped: bool
    extents: _containers.RepeatedCompositeFieldContainer[_types_pb2.Extent]
    rows: _containers.RepeatedCompositeFieldContainer[_types_pb2.TableIds]
    totals: _containers.RepeatedScalarFieldContainer[float]
    grant: bytes
    summed: _containers.RepeatedCompositeFieldContainer[SummedBatch]
    def __init__(self, fence: _Optional[_Union[_types_pb2.Fence, _Mapping]] = ..., batch: _Optional[_Union[_types_pb2.BatchId, _Mapping]] = ..., attempt: _Optional[int] = ..., base_version: _Optional[int] = ..., examples: _Optional[int] = ..., skipped: bool = ..., extents: _Optional[_Iterable[_Union[_types_pb2.Extent, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[_types_pb2.TableIds, _Mapping]]] = ..., totals: _Optional[_Iterable[float]] = ..., grant: _Optional[bytes] = ..., summed: _Optional[_Iterable[_Union[SummedBatch, _Mapping]]] = ...) -> None: ...

class SummedBatch(_message.Message):
    __slots__ = ("batch", "attempt", "grant", "totals")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    batch: _types_pb2.BatchId
    attempt: int
    grant: bytes
    totals: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, batch: _Optional[_Union[_types_pb2.BatchId, _Mapping]] = ..., attempt: _Optional[int] = ..., grant: _Optional[bytes] = ..., totals: _Optional[_Iterable[float]] = ...) -> None: ...

class PushResult(_message.Message):
    __slots__ = ("outcome", "version", "staleness", "apply_us", "receipt", "behind", "waited_us", "summed_receipts")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    APPLY_US_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    SUMMED_RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    outcome: PushOutcome
    version: int
    staleness: int
    apply_us: int
    receipt: bytes
    behind: bool
    waited_us: int
    summed_receipts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, outcome: _Optional[_Union[PushOutcome, str]] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., apply_us: _Optional[int] = ..., receipt: _Optional[bytes] = ..., behind: bool = ..., waited_us: _Optional[int] = ..., summed_receipts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PushGradientsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: _types_pb2.Chunk
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ...) -> None: ...

class PushGradientsResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: PushResult
    def __init__(self, result: _Optional[_Union[PushResult, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("pid", "fd", "nbytes", "nonce", "slot", "mailbox_at", "mailbox_nbytes", "session")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_AT_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    nbytes: int
    nonce: bytes
    slot: int
    mailbox_at: int
    mailbox_nbytes: int
    session: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., nbytes: _Optional[int] = ..., nonce: _Optional[bytes] = ..., slot: _Optional[int] = ..., mailbox_at: _Optional[int] = ..., mailbox_nbytes: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("refusal", "proof", "listens")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    LISTENS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    proof: bytes
    listens: bool
    def __init__(self, refusal: _Optional[str] = ..., proof: _Optional[bytes] = ..., listens: bool = ...) -> None: ...

class OpenData(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DataOpened(_message.Message):
    __slots__ = ("refusal", "port", "secret")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    port: int
    secret: bytes
    def __init__(self, refusal: _Optional[str] = ..., port: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class ExchangeHeader(_message.Message):
    __slots__ = ("push", "pull", "attach", "patience_ms", "push_at", "pull_at", "open_data", "use_data")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    PUSH_AT_FIELD_NUMBER: _ClassVar[int]
    PULL_AT_FIELD_NUMBER: _ClassVar[int]
    OPEN_DATA_FIELD_NUMBER: _ClassVar[int]
    USE_DATA_FIELD_NUMBER: _ClassVar[int]
    push: PushHeader
    pull: PullRequest
    attach: Attach
    patience_ms: int
    push_at: _containers.RepeatedScalarFieldContainer[int]
    pull_at: _containers.RepeatedScalarFieldContainer[int]
    open_data: OpenData
    use_data: bool
    def __init__(self, push: _Optional[_Union[PushHeader, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., patience_ms: _Optional[int] = ..., push_at: _Optional[_Iterable[int]] = ..., pull_at: _Optional[_Iterable[int]] = ..., open_data: _Optional[_Union[OpenData, _Mapping]] = ..., use_data: bool = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ExchangeHeader
    chunk: _types_pb2.Chunk
    def __init__(self, header: _Optional[_Union[ExchangeHeader, _Mapping]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ...) -> None: ...

class ExchangeAnswer(_message.Message):
    __slots__ = ("push", "pull", "attached", "data")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    push: PushResult
    pull: PullHeader
    attached: Attached
    data: DataOpened
    def __init__(self, push: _Optional[_Union[PushResult, _Mapping]] = ..., pull: _Optional[_Union[PullHeader, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., data: _Optional[_Union[DataOpened, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ExchangeAnswer
    chunk: _types_pb2.Chunk
    def __init__(self, header: _Optional[_Union[ExchangeAnswer, _Mapping]] = ..., chunk: _Optional[_Union[_types_pb2.Chunk, _Mapping]] = ...) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ("table", "ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    table: str
    ids: bytes
    def __init__(self, table: _Optional[str] = ..., ids: _Optional[bytes] = ...) -> None: ...

class LookUpResponse(_message.Message):
    __slots__ = ("version", "generation", "rows", "present")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    generation: int
    rows: bytes
    present: bytes
    def __init__(self, version: _Optional[int] = ..., generation: _Optional[int] = ..., rows: _Optional[bytes] = ..., present: _Optional[bytes] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "rows", "nbytes", "created", "evicted", "evicted_dropped", "candidates_dropped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_DROPPED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    nbytes: int
    created: int
    evicted: int
    evicted_dropped: int
    candidates_dropped: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., nbytes: _Optional[int] = ..., created: _Optional[int] = ..., evicted: _Optional[int] = ..., evicted_dropped: _Optional[int] = ..., candidates_dropped: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("shard", "incarnation", "generation", "policy", "version", "initialized", "nbytes", "applied", "already_applied", "staged", "skipped", "refused", "staleness_counts", "staged_now", "waiting_for", "workers", "too_stale", "uncompensated", "apply_s", "settings", "tables")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_APPLIED_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGED_NOW_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    UNCOMPENSATED_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    generation: int
    policy: int
    version: int
    initialized: bool
    nbytes: int
    applied: int
    already_applied: int
    staged: int
    skipped: int
    refused: int
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    staged_now: int
    waiting_for: str
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerStaleness]
    too_stale: int
    uncompensated: int
    apply_s: float
    settings: str
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., policy: _Optional[int] = ..., version: _Optional[int] = ..., initialized: bool = ..., nbytes: _Optional[int] = ..., applied: _Optional[int] = ..., already_applied: _Optional[int] = ..., staged: _Optional[int] = ..., skipped: _Optional[int] = ..., refused: _Optional[int] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., staged_now: _Optional[int] = ..., waiting_for: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[_types_pb2.WorkerStaleness, _Mapping]]] = ..., too_stale: _Optional[int] = ..., uncompensated: _Optional[int] = ..., apply_s: _Optional[float] = ..., settings: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ...) -> None: ...
