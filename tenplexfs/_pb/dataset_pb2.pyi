from tenplexfs._pb import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AddDatasetRequest(_message.Message):
    __slots__ = ("job", "name", "sources", "kind", "members", "record_bytes", "skip_bytes", "dtype", "shape", "sequence_length", "global_batch", "seed", "shuffle", "tail", "unsplit", "epoch", "consumed", "request_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    UNSPLIT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    sources: _containers.RepeatedScalarFieldContainer[str]
    kind: str
    members: bool
    record_bytes: int
    skip_bytes: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    sequence_length: int
    global_batch: int
    seed: int
    shuffle: bool
    tail: str
    unsplit: bool
    epoch: int
    consumed: int
    request_id: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., sources: _Optional[_Iterable[str]] = ..., kind: _Optional[str] = ..., members: _Optional[bool] = ..., record_bytes: _Optional[int] = ..., skip_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., sequence_length: _Optional[int] = ..., global_batch: _Optional[int] = ..., seed: _Optional[int] = ..., shuffle: _Optional[bool] = ..., tail: _Optional[str] = ..., unsplit: _Optional[bool] = ..., epoch: _Optional[int] = ..., consumed: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RemoveDatasetRequest(_message.Message):
    __slots__ = ("job", "name", "request_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    request_id: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class IndexRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class IndexReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReadSamplesRequest(_message.Message):
    __slots__ = ("digest", "ids", "read")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    digest: str
    ids: bytes
    read: bool
    def __init__(self, digest: _Optional[str] = ..., ids: _Optional[bytes] = ..., read: _Optional[bool] = ...) -> None: ...

class ReadSamplesReply(_message.Message):
    __slots__ = ("held", "data", "sum")
    HELD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    data: bytes
    sum: int
    def __init__(self, held: _Optional[bytes] = ..., data: _Optional[bytes] = ..., sum: _Optional[int] = ...) -> None: ...
