"""The state record: all that a store keeps of one key, in one value of readable JSON.

    {"schema":1,"definition":"9f2c...","state":{"legs":7},
     "lanes":{"flights.raw:2#Qx1>wrap>flights.legs":{"width":2,"held":[41,0,41,1],"floor":[17,1],"used":6}},
     "holes":{"...":[[12,0]]},"crc32c":"8f3a01bc"}

`held` are the positions one after another, `width` components each. Where positions of one lane differ in
width, because only some messages had an event id, `width` is 0 and `ragged` has one list a position.
"""

from itertools import chain
from typing import Any

import msgspec

from envelope import Position, Window, Windows
from persistence.errors import Corrupt
from persistence.protocol import StageRef
from persistence.seal import DamagedError, seal, unseal

SCHEMA = 1


class _Lane(msgspec.Struct, omit_defaults=True, gc=False):
    width: int
    held: list[int | str] = []
    ragged: list[list[int | str]] = []
    floor: list[int | str] | None = None
    used: int = 0


class _Record(msgspec.Struct, gc=False):
    schema: int
    definition: str
    state: Any
    lanes: dict[str, _Lane]
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
_schema_decoder = msgspec.json.Decoder(_Schema)


def encode_record(record: StateRecord) -> bytes:
    """Serialize a state record, checksum included."""
    lanes = {name: _lane(window) for name, window in record.windows.lanes.items()}
    holes = {name: [list(one) for one in sorted(positions)] for name, positions in record.windows.holes.items()}
    return seal(_encoder.encode(_Record(SCHEMA, record.definition, record.state, lanes, holes)))


def decode_record(value: bytes, at: StageRef, key: bytes) -> StateRecord:
    """Parse what `encode_record` wrote.

    Raises:
        Corrupt: It is damaged, is no state record, or was written by a newer version.
    """
    try:
        body = unseal(value)
        if (schema := _schema_decoder.decode(body).schema) > SCHEMA:
            raise Corrupt(f"the state has schema {schema}, this code reads {SCHEMA}", "Upgrade headwater", at, key)
        record = _decoder.decode(body)
        lanes = {name: _window(lane) for name, lane in record.lanes.items()}
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the state cannot be read: {error}", at=at, key=key) from error
    holes = {name: frozenset(tuple(one) for one in positions) for name, positions in record.holes.items()}
    return StateRecord(record.definition, record.state, Windows(lanes, holes))


def _lane(window: Window) -> _Lane:
    held = window.held
    floor = None if window.floor is None else list(window.floor)
    width = len(held[0]) if held else 0
    if any(len(one) != width for one in held):
        return _Lane(0, ragged=[list(one) for one in held], floor=floor, used=window.used)
    return _Lane(width, list(chain.from_iterable(held)), floor=floor, used=window.used)


def _window(lane: _Lane) -> Window:
    flat, width = lane.held, lane.width
    if width < 0 or (flat and (width == 0 or len(flat) % width)):
        raise DamagedError("a lane's positions do not fit its width")
    held: tuple[Position, ...]
    if width == 1:
        held = tuple((one,) for one in flat)
    elif flat:
        # One iterator taken `width` times yields the positions.
        held = tuple(zip(*[iter(flat)] * width, strict=True))
    else:
        held = tuple(tuple(one) for one in lane.ragged)
    return Window(held, None if lane.floor is None else tuple(lane.floor), lane.used)
