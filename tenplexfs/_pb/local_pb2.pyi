from tenplexfs._pb import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "version", "pid", "mount", "listen", "store_used_bytes", "store_limit_bytes", "jobs", "json")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    STORE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    pid: int
    mount: str
    listen: str
    store_used_bytes: int
    store_limit_bytes: int
    jobs: _containers.RepeatedCompositeFieldContainer[_control_pb2.Job]
    json: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., mount: _Optional[str] = ..., listen: _Optional[str] = ..., store_used_bytes: _Optional[int] = ..., store_limit_bytes: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[_control_pb2.Job, _Mapping]]] = ..., json: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[_control_pb2.Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[_control_pb2.Job, _Mapping]]] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("job", "path", "step", "ignore", "request_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    path: str
    step: int
    ignore: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, job: _Optional[str] = ..., path: _Optional[str] = ..., step: _Optional[int] = ..., ignore: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("job", "url", "step", "layout_json", "mesh", "nodes", "request_id", "replace")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    job: str
    url: str
    step: int
    layout_json: str
    mesh: _containers.RepeatedCompositeFieldContainer[_control_pb2.Axis]
    nodes: _containers.ScalarMap[str, int]
    request_id: str
    replace: bool
    def __init__(self, job: _Optional[str] = ..., url: _Optional[str] = ..., step: _Optional[int] = ..., layout_json: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[_control_pb2.Axis, _Mapping]]] = ..., nodes: _Optional[_Mapping[str, int]] = ..., request_id: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class SetJobRequest(_message.Message):
    __slots__ = ("job", "settings_json", "request_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    settings_json: str
    request_id: str
    def __init__(self, job: _Optional[str] = ..., settings_json: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class RebuildRegistryRequest(_message.Message):
    __slots__ = ("write", "force")
    WRITE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    write: bool
    force: bool
    def __init__(self, write: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class RebuildRegistryReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("bytes_done", "bytes_total", "mismatches")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    mismatches: _containers.RepeatedCompositeFieldContainer[Mismatch]
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., mismatches: _Optional[_Iterable[_Union[Mismatch, _Mapping]]] = ...) -> None: ...

class Mismatch(_message.Message):
    __slots__ = ("job", "txid", "rank", "path", "message")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    txid: str
    rank: int
    path: str
    message: str
    def __init__(self, job: _Optional[str] = ..., txid: _Optional[str] = ..., rank: _Optional[int] = ..., path: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
