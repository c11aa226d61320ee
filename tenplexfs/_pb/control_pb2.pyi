from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Axis(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class RankList(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "generation", "step", "txid", "state", "mesh", "nodes", "layout_json", "settings_json", "survives_node_losses", "message")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: RankList
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[RankList, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_NODE_LOSSES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    step: int
    txid: str
    state: str
    mesh: _containers.RepeatedCompositeFieldContainer[Axis]
    nodes: _containers.MessageMap[str, RankList]
    layout_json: str
    settings_json: str
    survives_node_losses: int
    message: str
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., txid: _Optional[str] = ..., state: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[Axis, _Mapping]]] = ..., nodes: _Optional[_Mapping[str, RankList]] = ..., layout_json: _Optional[str] = ..., settings_json: _Optional[str] = ..., survives_node_losses: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("name", "layout_json", "settings_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    layout_json: str
    settings_json: str
    def __init__(self, name: _Optional[str] = ..., layout_json: _Optional[str] = ..., settings_json: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("job", "layout_json", "mesh", "nodes", "drop", "operations")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    job: str
    layout_json: str
    mesh: _containers.RepeatedCompositeFieldContainer[Axis]
    nodes: _containers.ScalarMap[str, int]
    drop: _containers.RepeatedScalarFieldContainer[str]
    operations: bool
    def __init__(self, job: _Optional[str] = ..., layout_json: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[Axis, _Mapping]]] = ..., nodes: _Optional[_Mapping[str, int]] = ..., drop: _Optional[_Iterable[str]] = ..., operations: _Optional[bool] = ...) -> None: ...

class PlanSummary(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ReconfigureRequest(_message.Message):
    __slots__ = ("job", "layout_json", "mesh", "expected_generation", "request_id", "stop_timeout_s", "nodes", "drop")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    job: str
    layout_json: str
    mesh: _containers.RepeatedCompositeFieldContainer[Axis]
    expected_generation: int
    request_id: str
    stop_timeout_s: float
    nodes: _containers.ScalarMap[str, int]
    drop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., layout_json: _Optional[str] = ..., mesh: _Optional[_Iterable[_Union[Axis, _Mapping]]] = ..., expected_generation: _Optional[int] = ..., request_id: _Optional[str] = ..., stop_timeout_s: _Optional[float] = ..., nodes: _Optional[_Mapping[str, int]] = ..., drop: _Optional[_Iterable[str]] = ...) -> None: ...

class NotifyResourcesRequest(_message.Message):
    __slots__ = ("job", "nodes", "request_id", "stop_timeout_s")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    nodes: _containers.ScalarMap[str, int]
    request_id: str
    stop_timeout_s: float
    def __init__(self, job: _Optional[str] = ..., nodes: _Optional[_Mapping[str, int]] = ..., request_id: _Optional[str] = ..., stop_timeout_s: _Optional[float] = ...) -> None: ...

class NodeProgress(_message.Message):
    __slots__ = ("bytes_done", "bytes_total")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "nodes", "message", "plan", "job")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: NodeProgress
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[NodeProgress, _Mapping]] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    phase: str
    bytes_done: int
    bytes_total: int
    nodes: _containers.MessageMap[str, NodeProgress]
    message: str
    plan: PlanSummary
    job: Job
    def __init__(self, phase: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., nodes: _Optional[_Mapping[str, NodeProgress]] = ..., message: _Optional[str] = ..., plan: _Optional[_Union[PlanSummary, _Mapping]] = ..., job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("job", "step", "skip_samples", "request_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SKIP_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    skip_samples: int
    request_id: str
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., skip_samples: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class RemoveJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...
