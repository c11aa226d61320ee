from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Snapshot(_message.Message):
    __slots__ = ("generation", "step", "txid")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TXID_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    txid: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., txid: _Optional[str] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("snapshot", "layout_digest", "nodes")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    layout_digest: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., layout_digest: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class NameRequest(_message.Message):
    __slots__ = ("proposed",)
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    proposed: str
    def __init__(self, proposed: _Optional[str] = ...) -> None: ...

class NameReply(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class HeadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeadsReply(_message.Message):
    __slots__ = ("revision", "heads")
    class HeadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Head
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    heads: _containers.MessageMap[str, Head]
    def __init__(self, revision: _Optional[int] = ..., heads: _Optional[_Mapping[str, Head]] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("head", "owner", "token")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    head: Head
    owner: str
    token: int
    def __init__(self, head: _Optional[_Union[Head, _Mapping]] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class LockRequest(_message.Message):
    __slots__ = ("job", "owner", "ttl_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    owner: str
    ttl_s: float
    def __init__(self, job: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class LockReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("job", "owner", "token", "ttl_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    owner: str
    token: int
    ttl_s: float
    def __init__(self, job: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnlockRequest(_message.Message):
    __slots__ = ("job", "owner", "token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    owner: str
    token: int
    def __init__(self, job: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class UnlockReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompareAndSetRequest(_message.Message):
    __slots__ = ("job", "owner", "token", "expected", "new")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    job: str
    owner: str
    token: int
    expected: Head
    new: Head
    def __init__(self, job: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ..., expected: _Optional[_Union[Head, _Mapping]] = ..., new: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class CompareAndSetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class HeadEvent(_message.Message):
    __slots__ = ("revision", "job", "head")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    revision: int
    job: str
    head: Head
    def __init__(self, revision: _Optional[int] = ..., job: _Optional[str] = ..., head: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node", "endpoint", "incarnation", "version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    node: str
    endpoint: str
    incarnation: str
    version: str
    def __init__(self, node: _Optional[str] = ..., endpoint: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("info", "ttl_s")
    INFO_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    ttl_s: float
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...
