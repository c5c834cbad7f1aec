from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("format", "sealed", "event_id", "event_time_us", "key", "payload_type", "payload", "content_type", "chain", "producer", "sequence", "destination", "traceparent", "producer_epoch", "last_sequence", "sequence_per_partition", "checksum")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_US_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_PER_PARTITION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    format: int
    sealed: bool
    event_id: str
    event_time_us: int
    key: bytes
    payload_type: str
    payload: bytes
    content_type: str
    chain: _containers.RepeatedCompositeFieldContainer[Hop]
    producer: str
    sequence: int
    destination: str
    traceparent: str
    producer_epoch: int
    last_sequence: int
    sequence_per_partition: bool
    checksum: int
    def __init__(self, format: _Optional[int] = ..., sealed: bool = ..., event_id: _Optional[str] = ..., event_time_us: _Optional[int] = ..., key: _Optional[bytes] = ..., payload_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., content_type: _Optional[str] = ..., chain: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., producer: _Optional[str] = ..., sequence: _Optional[int] = ..., destination: _Optional[str] = ..., traceparent: _Optional[str] = ..., producer_epoch: _Optional[int] = ..., last_sequence: _Optional[int] = ..., sequence_per_partition: bool = ..., checksum: _Optional[int] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("topic", "partition", "offset", "via", "index", "count", "rekeyed", "pass_through", "topic_id", "leader_epoch", "timestamp_ms", "cluster", "keyless")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REKEYED_FIELD_NUMBER: _ClassVar[int]
    PASS_THROUGH_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    KEYLESS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    via: str
    index: int
    count: int
    rekeyed: bool
    pass_through: bool
    topic_id: str
    leader_epoch: int
    timestamp_ms: int
    cluster: str
    keyless: bool
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., via: _Optional[str] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., rekeyed: bool = ..., pass_through: bool = ..., topic_id: _Optional[str] = ..., leader_epoch: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., cluster: _Optional[str] = ..., keyless: bool = ...) -> None: ...
