from tenplexfs._pb import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesReply(_message.Message):
    __slots__ = ("nodes", "registry_away")
    NODES_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_AWAY_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    registry_away: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., registry_away: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "state", "endpoint", "incarnation", "version", "ranks", "sole_bytes", "registry")
    class RanksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _control_pb2.RankList
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_control_pb2.RankList, _Mapping]] = ...) -> None: ...
    class SoleBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    endpoint: str
    incarnation: str
    version: str
    ranks: _containers.MessageMap[str, _control_pb2.RankList]
    sole_bytes: _containers.ScalarMap[str, int]
    registry: bool
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., endpoint: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ..., ranks: _Optional[_Mapping[str, _control_pb2.RankList]] = ..., sole_bytes: _Optional[_Mapping[str, int]] = ..., registry: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "deadline_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    deadline_s: float
    def __init__(self, node: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("job", "progress")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    job: str
    progress: _control_pb2.Progress
    def __init__(self, job: _Optional[str] = ..., progress: _Optional[_Union[_control_pb2.Progress, _Mapping]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("node", "endpoints", "registry")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    node: str
    endpoints: _containers.ScalarMap[str, str]
    registry: str
    def __init__(self, node: _Optional[str] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., registry: _Optional[str] = ...) -> None: ...
