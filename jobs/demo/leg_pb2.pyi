from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leg(_message.Message):
    __slots__ = ("tail", "carrier", "event", "dep_delay", "arr_delay", "air_minutes")
    class Event(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVENT_UNSPECIFIED: _ClassVar[Leg.Event]
        EVENT_DEPARTED: _ClassVar[Leg.Event]
        EVENT_ARRIVED: _ClassVar[Leg.Event]
        EVENT_CANCELLED: _ClassVar[Leg.Event]
    EVENT_UNSPECIFIED: Leg.Event
    EVENT_DEPARTED: Leg.Event
    EVENT_ARRIVED: Leg.Event
    EVENT_CANCELLED: Leg.Event
    TAIL_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DEP_DELAY_FIELD_NUMBER: _ClassVar[int]
    ARR_DELAY_FIELD_NUMBER: _ClassVar[int]
    AIR_MINUTES_FIELD_NUMBER: _ClassVar[int]
    tail: str
    carrier: str
    event: Leg.Event
    dep_delay: int
    arr_delay: int
    air_minutes: int
    def __init__(self, tail: _Optional[str] = ..., carrier: _Optional[str] = ..., event: _Optional[_Union[Leg.Event, str]] = ..., dep_delay: _Optional[int] = ..., arr_delay: _Optional[int] = ..., air_minutes: _Optional[int] = ...) -> None: ...
