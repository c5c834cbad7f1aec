"""The state record: all that a store keeps of one key, in one value of readable JSON.

    {"schema":2,"definition":"9f2c...","state":{"legs":7},
     "lanes":{"flights.raw:2#Qx1>wrap>flights.legs":[{"at":[4],"held":[41,41,44],"index":[[0,1,0]],"floor":[17,1],"used":6}]},
     "retired":{"flights.raw:0#Qx1>wrap>flights.legs":[{"at":[[0,-3]],"floor":[[500,7,0,2,11],0]}]},
     "holes":{"...":[[12,0]]},"crc32c":"8f3a01bc"}

`persistence.lanes` says what lanes look like. Schema 1, which had every lane under its full name, is still read.
"""

from typing import Any

import msgspec

from envelope import Position, Window, Windows
from envelope.windows import is_loose
from persistence.errors import Corrupt
from persistence.lanes import Lane, Retired, packed, unpacked
from persistence.protocol import StageRef
from persistence.seal import DamagedError, seal, unseal

SCHEMA = 2

_HEAD = b'{"schema":%d,' % SCHEMA


class _Record(msgspec.Struct, omit_defaults=True, gc=False):
    schema: int
    definition: str
    state: Any
    lanes: dict[str, list[Lane]]
    retired: dict[str, list[Retired]] = {}
    holes: dict[str, list[list[int | str]]] = {}


class _Lane1(msgspec.Struct, gc=False):
    """A lane in schema 1: its positions one after another, `width` components each, or one list a position."""

    width: int
    held: list[int | str] = []
    ragged: list[list[int | str]] = []
    floor: list[int | str] | None = None
    used: int = 0


class _Record1(msgspec.Struct, gc=False):
    definition: str
    state: Any
    lanes: dict[str, _Lane1]
    holes: dict[str, list[list[int | str]]] = {}


class _Schema(msgspec.Struct, gc=False):
    schema: int


class StateRecord(msgspec.Struct, frozen=True):
    """A state with what it holds.

    Attributes:
        definition: Definition hash of the stage that made it.
        state: State of the fold, as JSON has it; None when only holes are known.
        windows: Windows and holes.
    """

    definition: str
    state: Any
    windows: Windows


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)
_first_decoder = msgspec.json.Decoder(_Record1)
_schema_decoder = msgspec.json.Decoder(_Schema)


def encode_record(record: StateRecord) -> bytes:
    """Serialize a state record, checksum included."""
    active, retired = packed(record.windows.lanes)
    holes = {name: [list(one) for one in sorted(positions)] for name, positions in record.windows.holes.items()}
    return seal(_encoder.encode(_Record(SCHEMA, record.definition, record.state, active, retired, holes)))


def decode_record(value: bytes, at: StageRef, key: bytes) -> StateRecord:
    """Parse what `encode_record` wrote, also an earlier version's.

    Raises:
        Corrupt: It is damaged, is no state record, or was written by a newer version.
    """
    try:
        body = unseal(value)
        schema = SCHEMA if body.startswith(_HEAD) else _schema_decoder.decode(body).schema
        if schema > SCHEMA:
            raise Corrupt(f"the state has schema {schema}, this code reads {SCHEMA}", "Upgrade headwater", at, key)
        if schema == 1:
            first = _first_decoder.decode(body)
            return _record(first, {name: _window(lane) for name, lane in first.lanes.items()})
        record = _decoder.decode(body)
        return _record(record, unpacked(record.lanes, record.retired))
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the state cannot be read: {error}", at=at, key=key) from error


def _record(read: _Record | _Record1, windows: dict[str, Window]) -> StateRecord:
    holes = {name: frozenset(tuple(one) for one in positions) for name, positions in read.holes.items()}
    return StateRecord(read.definition, read.state, Windows(windows, holes))


def _window(lane: _Lane1) -> Window:
    flat, width = lane.held, lane.width
    if width < 0 or (flat and (width == 0 or len(flat) % width)):
        raise DamagedError("a lane's positions do not fit its width")
    held: tuple[Position, ...]
    # One iterator taken `width` times yields the positions.
    held = tuple(zip(*[iter(flat)] * width, strict=True)) if flat else tuple(map(tuple, lane.ragged))
    return Window(held, None if lane.floor is None else tuple(lane.floor), lane.used, loose=any(map(is_loose, held)))
