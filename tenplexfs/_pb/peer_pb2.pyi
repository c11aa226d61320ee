from tenplexfs._pb import registry_pb2 as _registry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("node", "version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("node", "version", "jobs", "incarnation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    jobs: _containers.RepeatedScalarFieldContainer[str]
    incarnation: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., jobs: _Optional[_Iterable[str]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("job", "snapshot", "base_txid", "old_layout_json", "new_layout_json", "settings_json", "coordinator", "drop", "endpoints", "created_ns", "values", "source", "lost", "by", "leader")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BASE_TXID_FIELD_NUMBER: _ClassVar[int]
    OLD_LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    NEW_LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    job: str
    snapshot: _registry_pb2.Snapshot
    base_txid: str
    old_layout_json: str
    new_layout_json: str
    settings_json: str
    coordinator: str
    drop: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.ScalarMap[str, str]
    created_ns: int
    values: bytes
    source: str
    lost: _containers.RepeatedScalarFieldContainer[str]
    by: Mandate
    leader: str
    def __init__(self, job: _Optional[str] = ..., snapshot: _Optional[_Union[_registry_pb2.Snapshot, _Mapping]] = ..., base_txid: _Optional[str] = ..., old_layout_json: _Optional[str] = ..., new_layout_json: _Optional[str] = ..., settings_json: _Optional[str] = ..., coordinator: _Optional[str] = ..., drop: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., created_ns: _Optional[int] = ..., values: _Optional[bytes] = ..., source: _Optional[str] = ..., lost: _Optional[_Iterable[str]] = ..., by: _Optional[_Union[Mandate, _Mapping]] = ..., leader: _Optional[str] = ...) -> None: ...

class Mandate(_message.Message):
    __slots__ = ("owner", "token", "attempt")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    owner: str
    token: int
    attempt: int
    def __init__(self, owner: _Optional[str] = ..., token: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("bytes_done", "bytes_total")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("job", "head")
    JOB_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    job: str
    head: _registry_pb2.Head
    def __init__(self, job: _Optional[str] = ..., head: _Optional[_Union[_registry_pb2.Head, _Mapping]] = ...) -> None: ...

class SwitchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("job", "txid", "reason", "by")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    reason: str
    by: Mandate
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ..., reason: _Optional[str] = ..., by: _Optional[_Union[Mandate, _Mapping]] = ...) -> None: ...

class DropReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("job", "txid")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("snapshot", "layout_json", "settings_json", "created_ns", "committed", "values")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    snapshot: _registry_pb2.Snapshot
    layout_json: str
    settings_json: str
    created_ns: int
    committed: bool
    values: bytes
    def __init__(self, snapshot: _Optional[_Union[_registry_pb2.Snapshot, _Mapping]] = ..., layout_json: _Optional[str] = ..., settings_json: _Optional[str] = ..., created_ns: _Optional[int] = ..., committed: _Optional[bool] = ..., values: _Optional[bytes] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class InventoryReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[StoredPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[StoredPart, _Mapping]]] = ...) -> None: ...

class StoredPart(_message.Message):
    __slots__ = ("snapshot", "committed", "copies_of")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COPIES_OF_FIELD_NUMBER: _ClassVar[int]
    snapshot: _registry_pb2.Snapshot
    committed: bool
    copies_of: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[_Union[_registry_pb2.Snapshot, _Mapping]] = ..., committed: _Optional[bool] = ..., copies_of: _Optional[_Iterable[str]] = ...) -> None: ...

class SumsRequest(_message.Message):
    __slots__ = ("job", "txid")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ...) -> None: ...

class SumsReply(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: bytes
    def __init__(self, sums: _Optional[bytes] = ...) -> None: ...

class PersistRequest(_message.Message):
    __slots__ = ("job", "txid", "url", "persisted_step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    url: str
    persisted_step: int
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ..., url: _Optional[str] = ..., persisted_step: _Optional[int] = ...) -> None: ...

class PersistReply(_message.Message):
    __slots__ = ("bytes_done", "bytes_total", "files")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    files: bytes
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., files: _Optional[bytes] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("job", "snapshot", "leader", "patience_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    snapshot: _registry_pb2.Snapshot
    leader: str
    patience_s: float
    def __init__(self, job: _Optional[str] = ..., snapshot: _Optional[_Union[_registry_pb2.Snapshot, _Mapping]] = ..., leader: _Optional[str] = ..., patience_s: _Optional[float] = ...) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("is_complete", "values", "sums")
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    is_complete: bool
    values: bytes
    sums: bytes
    def __init__(self, is_complete: _Optional[bool] = ..., values: _Optional[bytes] = ..., sums: _Optional[bytes] = ...) -> None: ...

class StopAtRequest(_message.Message):
    __slots__ = ("job", "generation", "token", "action", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    token: str
    action: str
    step: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., token: _Optional[str] = ..., action: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class StopAtReply(_message.Message):
    __slots__ = ("told", "for_all", "ended")
    class ToldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TOLD_FIELD_NUMBER: _ClassVar[int]
    FOR_ALL_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    told: _containers.ScalarMap[int, int]
    for_all: bool
    ended: bool
    def __init__(self, told: _Optional[_Mapping[int, int]] = ..., for_all: _Optional[bool] = ..., ended: _Optional[bool] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("job", "txid", "lease_id", "ttl_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    lease_id: str
    ttl_s: float
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ..., lease_id: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
