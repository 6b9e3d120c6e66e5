from psrpc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetJobRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("run_id", "job_path", "job_sha256", "overrides", "mode", "replicas", "software", "intra_op_threads", "data_fingerprint", "settings_sha256")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_PATH_FIELD_NUMBER: _ClassVar[int]
    JOB_SHA256_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    INTRA_OP_THREADS_FIELD_NUMBER: _ClassVar[int]
    DATA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SHA256_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_path: str
    job_sha256: str
    overrides: _containers.RepeatedScalarFieldContainer[str]
    mode: str
    replicas: int
    software: str
    intra_op_threads: int
    data_fingerprint: str
    settings_sha256: str
    def __init__(self, run_id: _Optional[str] = ..., job_path: _Optional[str] = ..., job_sha256: _Optional[str] = ..., overrides: _Optional[_Iterable[str]] = ..., mode: _Optional[str] = ..., replicas: _Optional[int] = ..., software: _Optional[str] = ..., intra_op_threads: _Optional[int] = ..., data_fingerprint: _Optional[str] = ..., settings_sha256: _Optional[str] = ...) -> None: ...

class RegisterShardRequest(_message.Message):
    __slots__ = ("shard", "incarnation", "address", "host", "pid", "software", "worker")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    address: str
    host: str
    pid: int
    software: str
    worker: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., software: _Optional[str] = ..., worker: _Optional[int] = ...) -> None: ...

class RegisterShardResponse(_message.Message):
    __slots__ = ("run_id", "plan", "optimizer", "engine", "run_dir", "token", "heartbeat_s", "wire_dtype", "first_rows")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    plan: bytes
    optimizer: bytes
    engine: str
    run_dir: str
    token: str
    heartbeat_s: float
    wire_dtype: str
    first_rows: str
    def __init__(self, run_id: _Optional[str] = ..., plan: _Optional[bytes] = ..., optimizer: _Optional[bytes] = ..., engine: _Optional[str] = ..., run_dir: _Optional[str] = ..., token: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., wire_dtype: _Optional[str] = ..., first_rows: _Optional[str] = ...) -> None: ...

class ReportShardReadyRequest(_message.Message):
    __slots__ = ("shard", "incarnation", "generation", "version", "initialized", "applied", "error")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    generation: int
    version: int
    initialized: bool
    applied: _containers.RepeatedCompositeFieldContainer[_types_pb2.AppliedEpoch]
    error: str
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., initialized: bool = ..., applied: _Optional[_Iterable[_Union[_types_pb2.AppliedEpoch, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class ReportShardReadyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatShardRequest(_message.Message):
    __slots__ = ("shard", "incarnation", "generation", "version", "applied", "already_applied", "skipped", "refused", "staleness_counts", "waiting_for", "failure", "revoked", "leaving", "workers", "too_stale", "uncompensated", "apply_s", "gradient_nbytes", "memory_nbytes", "table_rows", "table_nbytes", "epochs")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_APPLIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    UNCOMPENSATED_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    generation: int
    version: int
    applied: int
    already_applied: int
    skipped: int
    refused: int
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    waiting_for: str
    failure: str
    revoked: int
    leaving: bool
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerStaleness]
    too_stale: int
    uncompensated: int
    apply_s: float
    gradient_nbytes: int
    memory_nbytes: int
    table_rows: int
    table_nbytes: int
    epochs: _containers.RepeatedCompositeFieldContainer[_types_pb2.EpochTotals]
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., applied: _Optional[int] = ..., already_applied: _Optional[int] = ..., skipped: _Optional[int] = ..., refused: _Optional[int] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., waiting_for: _Optional[str] = ..., failure: _Optional[str] = ..., revoked: _Optional[int] = ..., leaving: bool = ..., workers: _Optional[_Iterable[_Union[_types_pb2.WorkerStaleness, _Mapping]]] = ..., too_stale: _Optional[int] = ..., uncompensated: _Optional[int] = ..., apply_s: _Optional[float] = ..., gradient_nbytes: _Optional[int] = ..., memory_nbytes: _Optional[int] = ..., table_rows: _Optional[int] = ..., table_nbytes: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[_types_pb2.EpochTotals, _Mapping]]] = ...) -> None: ...

class HeartbeatShardResponse(_message.Message):
    __slots__ = ("unknown", "saved", "waiting_for", "saving")
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    unknown: bool
    saved: bool
    waiting_for: str
    saving: bool
    def __init__(self, unknown: bool = ..., saved: bool = ..., waiting_for: _Optional[str] = ..., saving: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("shard", "incarnation", "generation", "initialized", "version")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    generation: int
    initialized: bool
    version: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., initialized: bool = ..., version: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("generation", "policy", "keep", "restore", "fresh", "decision", "settings", "version", "rate_scale", "warmup_updates", "verify_key", "grant_key")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_UPDATES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_KEY_FIELD_NUMBER: _ClassVar[int]
    GRANT_KEY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    keep: bool
    restore: str
    fresh: bool
    decision: _types_pb2.Decision
    settings: bytes
    version: int
    rate_scale: float
    warmup_updates: int
    verify_key: bytes
    grant_key: bytes
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., keep: bool = ..., restore: _Optional[str] = ..., fresh: bool = ..., decision: _Optional[_Union[_types_pb2.Decision, _Mapping]] = ..., settings: _Optional[bytes] = ..., version: _Optional[int] = ..., rate_scale: _Optional[float] = ..., warmup_updates: _Optional[int] = ..., verify_key: _Optional[bytes] = ..., grant_key: _Optional[bytes] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("number", "worker", "attempts", "ends_ahead")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker: str
    attempts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Attempt]
    ends_ahead: bool
    def __init__(self, number: _Optional[int] = ..., worker: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[_types_pb2.Attempt, _Mapping]]] = ..., ends_ahead: bool = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("decision", "snapshot", "release_snapshot", "shutdown", "begin", "revocation", "rounds_ahead", "awaited")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    decision: _types_pb2.Decision
    snapshot: _types_pb2.SnapshotOrder
    release_snapshot: str
    shutdown: Shutdown
    begin: Begin
    revocation: Revocation
    rounds_ahead: RoundsAhead
    awaited: AwaitedWorkers
    def __init__(self, decision: _Optional[_Union[_types_pb2.Decision, _Mapping]] = ..., snapshot: _Optional[_Union[_types_pb2.SnapshotOrder, _Mapping]] = ..., release_snapshot: _Optional[str] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., revocation: _Optional[_Union[Revocation, _Mapping]] = ..., rounds_ahead: _Optional[_Union[RoundsAhead, _Mapping]] = ..., awaited: _Optional[_Union[AwaitedWorkers, _Mapping]] = ...) -> None: ...

class AwaitedWorkers(_message.Message):
    __slots__ = ("number", "workers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerClock]
    def __init__(self, number: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[_types_pb2.WorkerClock, _Mapping]]] = ...) -> None: ...

class RoundsAhead(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[_types_pb2.Decision, _Mapping]]] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("failed", "reason")
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    failed: bool
    reason: str
    def __init__(self, failed: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ReportSnapshotRequest(_message.Message):
    __slots__ = ("shard", "incarnation", "generation", "name", "version", "file", "nbytes", "sha256", "error", "rows", "evicted", "epochs")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    generation: int
    name: str
    version: int
    file: str
    nbytes: int
    sha256: str
    error: str
    rows: _containers.RepeatedCompositeFieldContainer[RowsFile]
    evicted: RowsFile
    epochs: _containers.RepeatedCompositeFieldContainer[_types_pb2.EpochTotals]
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., file: _Optional[str] = ..., nbytes: _Optional[int] = ..., sha256: _Optional[str] = ..., error: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[RowsFile, _Mapping]]] = ..., evicted: _Optional[_Union[RowsFile, _Mapping]] = ..., epochs: _Optional[_Iterable[_Union[_types_pb2.EpochTotals, _Mapping]]] = ...) -> None: ...

class RowsFile(_message.Message):
    __slots__ = ("file", "nbytes", "sha256")
    FILE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    file: str
    nbytes: int
    sha256: str
    def __init__(self, file: _Optional[str] = ..., nbytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ReportSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("incarnation", "host", "pid", "job_sha256", "software", "device", "settings_sha256", "secret", "hosts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    JOB_SHA256_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    host: str
    pid: int
    job_sha256: str
    software: str
    device: str
    settings_sha256: str
    secret: bytes
    hosts: bool
    def __init__(self, incarnation: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., job_sha256: _Optional[str] = ..., software: _Optional[str] = ..., device: _Optional[str] = ..., settings_sha256: _Optional[str] = ..., secret: _Optional[bytes] = ..., hosts: bool = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("worker", "heartbeat_s", "session")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    heartbeat_s: float
    session: bytes
    def __init__(self, worker: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., session: _Optional[bytes] = ...) -> None: ...

class BatchReport(_message.Message):
    __slots__ = ("batch", "attempt", "loss", "staleness", "skipped", "too_stale", "receipts", "not_finite")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    batch: _types_pb2.BatchId
    attempt: int
    loss: float
    staleness: int
    skipped: bool
    too_stale: bool
    receipts: _containers.RepeatedScalarFieldContainer[bytes]
    not_finite: str
    def __init__(self, batch: _Optional[_Union[_types_pb2.BatchId, _Mapping]] = ..., attempt: _Optional[int] = ..., loss: _Optional[float] = ..., staleness: _Optional[int] = ..., skipped: bool = ..., too_stale: bool = ..., receipts: _Optional[_Iterable[bytes]] = ..., not_finite: _Optional[str] = ...) -> None: ...

class WorkerTimes(_message.Message):
    __slots__ = ("data", "compute", "barrier", "network", "apply")
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    data: float
    compute: float
    barrier: float
    network: float
    apply: float
    def __init__(self, data: _Optional[float] = ..., compute: _Optional[float] = ..., barrier: _Optional[float] = ..., network: _Optional[float] = ..., apply: _Optional[float] = ...) -> None: ...

class UnreachableShard(_message.Message):
    __slots__ = ("shard", "for_s")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    shard: int
    for_s: float
    def __init__(self, shard: _Optional[int] = ..., for_s: _Optional[float] = ...) -> None: ...

class WorkerPosition(_message.Message):
    __slots__ = ("phase", "position", "median_step_s")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[WorkerPosition.Phase]
        PHASE_WAITING: _ClassVar[WorkerPosition.Phase]
        PHASE_DATA: _ClassVar[WorkerPosition.Phase]
        PHASE_COMPILING: _ClassVar[WorkerPosition.Phase]
        PHASE_COMPUTING: _ClassVar[WorkerPosition.Phase]
        PHASE_EXCHANGING: _ClassVar[WorkerPosition.Phase]
    PHASE_UNSPECIFIED: WorkerPosition.Phase
    PHASE_WAITING: WorkerPosition.Phase
    PHASE_DATA: WorkerPosition.Phase
    PHASE_COMPILING: WorkerPosition.Phase
    PHASE_COMPUTING: WorkerPosition.Phase
    PHASE_EXCHANGING: WorkerPosition.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_STEP_S_FIELD_NUMBER: _ClassVar[int]
    phase: WorkerPosition.Phase
    position: int
    median_step_s: float
    def __init__(self, phase: _Optional[_Union[WorkerPosition.Phase, str]] = ..., position: _Optional[int] = ..., median_step_s: _Optional[float] = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("shard", "kind", "why")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Transport.Kind]
        KIND_SHARED_MEMORY: _ClassVar[Transport.Kind]
        KIND_DATA_CONNECTION: _ClassVar[Transport.Kind]
        KIND_CALLS: _ClassVar[Transport.Kind]
        KIND_OWN_PROCESS: _ClassVar[Transport.Kind]
    KIND_UNSPECIFIED: Transport.Kind
    KIND_SHARED_MEMORY: Transport.Kind
    KIND_DATA_CONNECTION: Transport.Kind
    KIND_CALLS: Transport.Kind
    KIND_OWN_PROCESS: Transport.Kind
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    shard: int
    kind: Transport.Kind
    why: str
    def __init__(self, shard: _Optional[int] = ..., kind: _Optional[_Union[Transport.Kind, str]] = ..., why: _Optional[str] = ...) -> None: ...

class HeartbeatWorkerRequest(_message.Message):
    __slots__ = ("generation", "policy", "done", "waiting_for", "times", "unreachable", "position", "transports", "session")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    done: _containers.RepeatedCompositeFieldContainer[BatchReport]
    waiting_for: str
    times: WorkerTimes
    unreachable: _containers.RepeatedCompositeFieldContainer[UnreachableShard]
    position: WorkerPosition
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    session: bytes
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., done: _Optional[_Iterable[_Union[BatchReport, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., times: _Optional[_Union[WorkerTimes, _Mapping]] = ..., unreachable: _Optional[_Iterable[_Union[UnreachableShard, _Mapping]]] = ..., position: _Optional[_Union[WorkerPosition, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., session: _Optional[bytes] = ...) -> None: ...

class HeartbeatWorkerResponse(_message.Message):
    __slots__ = ("unknown", "shutdown", "generation", "slices")
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    unknown: bool
    shutdown: Shutdown
    generation: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown: bool = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., generation: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class ShardAddress(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("generation", "policy", "plan", "shards")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    plan: bytes
    shards: _containers.RepeatedCompositeFieldContainer[ShardAddress]
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., plan: _Optional[bytes] = ..., shards: _Optional[_Iterable[_Union[ShardAddress, _Mapping]]] = ...) -> None: ...

class LeaseWorkRequest(_message.Message):
    __slots__ = ("generation", "policy", "done", "received", "session", "rounds_ahead", "clocks", "devices")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    done: _containers.RepeatedCompositeFieldContainer[BatchReport]
    received: int
    session: bytes
    rounds_ahead: bool
    clocks: bool
    devices: int
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., done: _Optional[_Iterable[_Union[BatchReport, _Mapping]]] = ..., received: _Optional[int] = ..., session: _Optional[bytes] = ..., rounds_ahead: bool = ..., clocks: bool = ..., devices: _Optional[int] = ...) -> None: ...

class LeaseWorkResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("generation", "policy", "initialize", "train", "round", "evaluate", "merge", "wait", "finished", "rounds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    initialize: InitializeWork
    train: TrainTask
    round: RoundWork
    evaluate: EvaluateTask
    merge: MergeEvaluation
    wait: Wait
    finished: Shutdown
    rounds: RoundsTask
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., initialize: _Optional[_Union[InitializeWork, _Mapping]] = ..., train: _Optional[_Union[TrainTask, _Mapping]] = ..., round: _Optional[_Union[RoundWork, _Mapping]] = ..., evaluate: _Optional[_Union[EvaluateTask, _Mapping]] = ..., merge: _Optional[_Union[MergeEvaluation, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., finished: _Optional[_Union[Shutdown, _Mapping]] = ..., rounds: _Optional[_Union[RoundsTask, _Mapping]] = ...) -> None: ...

class InitializeWork(_message.Message):
    __slots__ = ("grant", "first_rows")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    first_rows: str
    def __init__(self, grant: _Optional[bytes] = ..., first_rows: _Optional[str] = ...) -> None: ...

class TrainTask(_message.Message):
    __slots__ = ("batches", "fresh", "clock")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[_types_pb2.Attempt]
    fresh: bool
    clock: _types_pb2.WorkerClock
    def __init__(self, batches: _Optional[_Iterable[_Union[_types_pb2.Attempt, _Mapping]]] = ..., fresh: bool = ..., clock: _Optional[_Union[_types_pb2.WorkerClock, _Mapping]] = ...) -> None: ...

class RoundWork(_message.Message):
    __slots__ = ("round", "attempt", "newest", "decision", "pull_next", "ahead", "beside")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    PULL_NEXT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: _types_pb2.Attempt
    newest: bool
    decision: _types_pb2.SignedDecision
    pull_next: bool
    ahead: _types_pb2.Attempt
    beside: _containers.RepeatedCompositeFieldContainer[_types_pb2.Attempt]
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[_Union[_types_pb2.Attempt, _Mapping]] = ..., newest: bool = ..., decision: _Optional[_Union[_types_pb2.SignedDecision, _Mapping]] = ..., pull_next: bool = ..., ahead: _Optional[_Union[_types_pb2.Attempt, _Mapping]] = ..., beside: _Optional[_Iterable[_Union[_types_pb2.Attempt, _Mapping]]] = ...) -> None: ...

class RoundsTask(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptAhead]
    def __init__(self, attempts: _Optional[_Iterable[_Union[AttemptAhead, _Mapping]]] = ...) -> None: ...

class AttemptAhead(_message.Message):
    __slots__ = ("round", "attempt")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: _types_pb2.Attempt
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[_Union[_types_pb2.Attempt, _Mapping]] = ...) -> None: ...

class EvaluateTask(_message.Message):
    __slots__ = ("evaluation", "task", "snapshot", "start", "stop")
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    evaluation: str
    task: int
    snapshot: str
    start: int
    stop: int
    def __init__(self, evaluation: _Optional[str] = ..., task: _Optional[int] = ..., snapshot: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class MergeEvaluation(_message.Message):
    __slots__ = ("evaluation", "states", "training")
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    evaluation: str
    states: MetricStates
    training: bool
    def __init__(self, evaluation: _Optional[str] = ..., states: _Optional[_Union[MetricStates, _Mapping]] = ..., training: bool = ...) -> None: ...

class MetricStates(_message.Message):
    __slots__ = ("variables",)
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[MetricVariable]
    def __init__(self, variables: _Optional[_Iterable[_Union[MetricVariable, _Mapping]]] = ...) -> None: ...

class MetricVariable(_message.Message):
    __slots__ = ("shape", "values")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CommitBatchRequest(_message.Message):
    __slots__ = ("generation", "policy", "round", "report", "session", "rounds_ahead", "devices")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: int
    round: int
    report: BatchReport
    session: bytes
    rounds_ahead: bool
    devices: int
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[int] = ..., round: _Optional[int] = ..., report: _Optional[_Union[BatchReport, _Mapping]] = ..., session: _Optional[bytes] = ..., rounds_ahead: bool = ..., devices: _Optional[int] = ...) -> None: ...

class CommitBatchResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ReportWorkRequest(_message.Message):
    __slots__ = ("generation", "initialized", "evaluated", "merged", "session")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    initialized: InitializeDone
    evaluated: EvaluateDone
    merged: MergeDone
    session: bytes
    def __init__(self, generation: _Optional[int] = ..., initialized: _Optional[_Union[InitializeDone, _Mapping]] = ..., evaluated: _Optional[_Union[EvaluateDone, _Mapping]] = ..., merged: _Optional[_Union[MergeDone, _Mapping]] = ..., session: _Optional[bytes] = ...) -> None: ...

class InitializeDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateDone(_message.Message):
    __slots__ = ("evaluation", "task", "records", "states")
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    evaluation: str
    task: int
    records: int
    states: MetricStates
    def __init__(self, evaluation: _Optional[str] = ..., task: _Optional[int] = ..., records: _Optional[int] = ..., states: _Optional[_Union[MetricStates, _Mapping]] = ...) -> None: ...

class MergeDone(_message.Message):
    __slots__ = ("evaluation", "results")
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    evaluation: str
    results: _containers.ScalarMap[str, float]
    def __init__(self, evaluation: _Optional[str] = ..., results: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReportWorkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveWorkerRequest(_message.Message):
    __slots__ = ("reason", "fatal", "session")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    fatal: bool
    session: bytes
    def __init__(self, reason: _Optional[str] = ..., fatal: bool = ..., session: _Optional[bytes] = ...) -> None: ...

class LeaveWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settings: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "settings", "restart")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    policy: int
    settings: str
    restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[int] = ..., settings: _Optional[str] = ..., restart: _Optional[_Iterable[str]] = ...) -> None: ...

class AwaitHoldRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class AwaitHoldResponse(_message.Message):
    __slots__ = ("held", "at", "global_step", "epoch", "checkpoint", "evaluation", "phase", "reason", "warnings")
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HELD_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    held: bool
    at: int
    global_step: int
    epoch: int
    checkpoint: str
    evaluation: _containers.ScalarMap[str, float]
    phase: str
    reason: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, held: bool = ..., at: _Optional[int] = ..., global_step: _Optional[int] = ..., epoch: _Optional[int] = ..., checkpoint: _Optional[str] = ..., evaluation: _Optional[_Mapping[str, float]] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class EndHoldRequest(_message.Message):
    __slots__ = ("at", "until", "rate", "restore")
    AT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    at: int
    until: int
    rate: float
    restore: str
    def __init__(self, at: _Optional[int] = ..., until: _Optional[int] = ..., rate: _Optional[float] = ..., restore: _Optional[str] = ...) -> None: ...

class EndHoldResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RevokeWorkerRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "reason", "bar")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BAR_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    reason: str
    bar: bool
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., bar: bool = ...) -> None: ...

class RevokeWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJobStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "address", "state", "version", "nbytes", "applied", "refused", "silent_s", "waiting_for", "staleness_counts", "too_stale", "uncompensated", "apply_s", "gradient_nbytes", "memory_nbytes", "updates_per_s", "gradient_nbytes_per_s", "incarnation", "table_rows", "table_nbytes", "slice", "worker")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    UNCOMPENSATED_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_PER_S_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NBYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    address: str
    state: str
    version: int
    nbytes: int
    applied: int
    refused: int
    silent_s: float
    waiting_for: str
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    too_stale: int
    uncompensated: int
    apply_s: float
    gradient_nbytes: int
    memory_nbytes: int
    updates_per_s: float
    gradient_nbytes_per_s: float
    incarnation: int
    table_rows: int
    table_nbytes: int
    slice: bool
    worker: str
    def __init__(self, shard: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., nbytes: _Optional[int] = ..., applied: _Optional[int] = ..., refused: _Optional[int] = ..., silent_s: _Optional[float] = ..., waiting_for: _Optional[str] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., too_stale: _Optional[int] = ..., uncompensated: _Optional[int] = ..., apply_s: _Optional[float] = ..., gradient_nbytes: _Optional[int] = ..., memory_nbytes: _Optional[int] = ..., updates_per_s: _Optional[float] = ..., gradient_nbytes_per_s: _Optional[float] = ..., incarnation: _Optional[int] = ..., table_rows: _Optional[int] = ..., table_nbytes: _Optional[int] = ..., slice: bool = ..., worker: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "host", "pid", "device", "state", "batches", "batches_per_s", "silent_s", "waiting_for", "incarnation", "examples_per_s", "times", "staleness_counts", "slowness", "unreachable", "transports")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    host: str
    pid: int
    device: str
    state: str
    batches: int
    batches_per_s: float
    silent_s: float
    waiting_for: str
    incarnation: int
    examples_per_s: float
    times: WorkerTimes
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    slowness: float
    unreachable: _containers.RepeatedCompositeFieldContainer[UnreachableShard]
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    def __init__(self, worker: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., state: _Optional[str] = ..., batches: _Optional[int] = ..., batches_per_s: _Optional[float] = ..., silent_s: _Optional[float] = ..., waiting_for: _Optional[str] = ..., incarnation: _Optional[int] = ..., examples_per_s: _Optional[float] = ..., times: _Optional[_Union[WorkerTimes, _Mapping]] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., slowness: _Optional[float] = ..., unreachable: _Optional[_Iterable[_Union[UnreachableShard, _Mapping]]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ...) -> None: ...

class PolicyChange(_message.Message):
    __slots__ = ("policy", "settings", "global_step", "learning_rate")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    policy: int
    settings: str
    global_step: int
    learning_rate: str
    def __init__(self, policy: _Optional[int] = ..., settings: _Optional[str] = ..., global_step: _Optional[int] = ..., learning_rate: _Optional[str] = ...) -> None: ...

class EvaluationResult(_message.Message):
    __slots__ = ("evaluation", "global_step", "results")
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    evaluation: str
    global_step: int
    results: _containers.ScalarMap[str, float]
    def __init__(self, evaluation: _Optional[str] = ..., global_step: _Optional[int] = ..., results: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GetJobStatusResponse(_message.Message):
    __slots__ = ("run_id", "job", "phase", "mode", "replicas", "global_step", "total_steps", "epoch", "epochs", "examples", "batches", "steps_per_s", "examples_per_s", "loss", "mean_staleness", "shards", "workers", "evaluations", "newest_checkpoint", "refused", "skipped", "failed", "waiting_for", "reason", "warnings", "generation", "policy", "settings", "switching", "policies", "version_skew", "staleness_counts", "too_stale", "speculative", "superseded", "late", "overdue", "stragglers", "waited_s", "checkpoint_age_s", "insecure", "software", "clock_s", "run_dir", "free_nbytes", "restored", "stuck", "steps_done", "counted", "batches_per_s", "workers_joined", "workers_departed", "checkpoint_interval_s", "changed", "summed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MEAN_STALENESS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SWITCHING_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_SKEW_FIELD_NUMBER: _ClassVar[int]
    STALENESS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    INSECURE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    FREE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_JOINED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_DEPARTED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job: str
    phase: str
    mode: str
    replicas: int
    global_step: int
    total_steps: int
    epoch: int
    epochs: int
    examples: int
    batches: int
    steps_per_s: float
    examples_per_s: float
    loss: float
    mean_staleness: float
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationResult]
    newest_checkpoint: str
    refused: int
    skipped: int
    failed: int
    waiting_for: str
    reason: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    generation: int
    policy: int
    settings: str
    switching: str
    policies: _containers.RepeatedCompositeFieldContainer[PolicyChange]
    version_skew: int
    staleness_counts: _containers.RepeatedScalarFieldContainer[int]
    too_stale: int
    speculative: int
    superseded: int
    late: int
    overdue: int
    stragglers: _containers.RepeatedScalarFieldContainer[str]
    waited_s: float
    checkpoint_age_s: float
    insecure: bool
    software: str
    clock_s: float
    run_dir: str
    free_nbytes: int
    restored: str
    stuck: _containers.RepeatedScalarFieldContainer[str]
    steps_done: int
    counted: BatchesCounted
    batches_per_s: float
    workers_joined: int
    workers_departed: int
    checkpoint_interval_s: float
    changed: _containers.RepeatedScalarFieldContainer[str]
    summed: int
    def __init__(self, run_id: _Optional[str] = ..., job: _Optional[str] = ..., phase: _Optional[str] = ..., mode: _Optional[str] = ..., replicas: _Optional[int] = ..., global_step: _Optional[int] = ..., total_steps: _Optional[int] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., examples: _Optional[int] = ..., batches: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., examples_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., mean_staleness: _Optional[float] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationResult, _Mapping]]] = ..., newest_checkpoint: _Optional[str] = ..., refused: _Optional[int] = ..., skipped: _Optional[int] = ..., failed: _Optional[int] = ..., waiting_for: _Optional[str] = ..., reason: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., generation: _Optional[int] = ..., policy: _Optional[int] = ..., settings: _Optional[str] = ..., switching: _Optional[str] = ..., policies: _Optional[_Iterable[_Union[PolicyChange, _Mapping]]] = ..., version_skew: _Optional[int] = ..., staleness_counts: _Optional[_Iterable[int]] = ..., too_stale: _Optional[int] = ..., speculative: _Optional[int] = ..., superseded: _Optional[int] = ..., late: _Optional[int] = ..., overdue: _Optional[int] = ..., stragglers: _Optional[_Iterable[str]] = ..., waited_s: _Optional[float] = ..., checkpoint_age_s: _Optional[float] = ..., insecure: bool = ..., software: _Optional[str] = ..., clock_s: _Optional[float] = ..., run_dir: _Optional[str] = ..., free_nbytes: _Optional[int] = ..., restored: _Optional[str] = ..., stuck: _Optional[_Iterable[str]] = ..., steps_done: _Optional[int] = ..., counted: _Optional[_Union[BatchesCounted, _Mapping]] = ..., batches_per_s: _Optional[float] = ..., workers_joined: _Optional[int] = ..., workers_departed: _Optional[int] = ..., checkpoint_interval_s: _Optional[float] = ..., changed: _Optional[_Iterable[str]] = ..., summed: _Optional[int] = ...) -> None: ...

class BatchesCounted(_message.Message):
    __slots__ = ("batches", "counted", "skipped", "twice", "missing_batches", "skipped_batches")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TWICE_FIELD_NUMBER: _ClassVar[int]
    MISSING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: int
    counted: int
    skipped: int
    twice: int
    missing_batches: _containers.RepeatedScalarFieldContainer[str]
    skipped_batches: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batches: _Optional[int] = ..., counted: _Optional[int] = ..., skipped: _Optional[int] = ..., twice: _Optional[int] = ..., missing_batches: _Optional[_Iterable[str]] = ..., skipped_batches: _Optional[_Iterable[str]] = ...) -> None: ...

class GetDashboardRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Curves(_message.Message):
    __slots__ = ("at", "step", "loss", "examples_per_s", "steps_per_s", "staleness", "workers")
    AT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    at: _containers.RepeatedScalarFieldContainer[float]
    step: _containers.RepeatedScalarFieldContainer[int]
    loss: _containers.RepeatedScalarFieldContainer[float]
    examples_per_s: _containers.RepeatedScalarFieldContainer[float]
    steps_per_s: _containers.RepeatedScalarFieldContainer[float]
    staleness: _containers.RepeatedScalarFieldContainer[float]
    workers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[_Iterable[float]] = ..., step: _Optional[_Iterable[int]] = ..., loss: _Optional[_Iterable[float]] = ..., examples_per_s: _Optional[_Iterable[float]] = ..., steps_per_s: _Optional[_Iterable[float]] = ..., staleness: _Optional[_Iterable[float]] = ..., workers: _Optional[_Iterable[float]] = ...) -> None: ...

class DashboardEvent(_message.Message):
    __slots__ = ("number", "at", "step", "kind", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    at: float
    step: int
    kind: str
    text: str
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., step: _Optional[int] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GetDashboardResponse(_message.Message):
    __slots__ = ("now_s", "looked_s", "started_s", "status", "recent", "whole", "width", "events")
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    LOOKED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    looked_s: float
    started_s: float
    status: GetJobStatusResponse
    recent: Curves
    whole: Curves
    width: int
    events: _containers.RepeatedCompositeFieldContainer[DashboardEvent]
    def __init__(self, now_s: _Optional[float] = ..., looked_s: _Optional[float] = ..., started_s: _Optional[float] = ..., status: _Optional[_Union[GetJobStatusResponse, _Mapping]] = ..., recent: _Optional[_Union[Curves, _Mapping]] = ..., whole: _Optional[_Union[Curves, _Mapping]] = ..., width: _Optional[int] = ..., events: _Optional[_Iterable[_Union[DashboardEvent, _Mapping]]] = ...) -> None: ...
