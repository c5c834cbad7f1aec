"""The state record: everything that a store keeps for one key, as one readable JSON value.

    {"schema":2,"definition":"9f2c...","state":{"legs":7},
     "lanes":{"flights.raw:2#Qx1>wrap>flights.legs":[{"at":[4],"held":[41,41,44],"index":[[0,1,0]],"floor":[17,1],"used":6}]},
     "retired":{"flights.raw:0#Qx1>wrap>flights.legs":[{"at":[[0,-3]],"floor":[[500,7,0,2,11],0]}]},
     "holes":{"...":[[12,0]]},"kept":{"...":[[[9,0],{"legs":3}]]},"crc32c":"8f3a01bc"}

`persistence.lanes` describes the format of lanes, `persistence.floors` that of retired ones. Schema 1, with every lane under its full name, was never released.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from envelope import Histories, Position
from persistence.errors import Corrupt
from persistence.floors import Retired
from persistence.lanes import LaneRecord, packed, unpacked
from persistence.protocol import StageRef
from persistence.seal import DamagedError, seal, unseal

SCHEMA = 2

_HEAD = b'{"schema":%d,' % SCHEMA


class _Record(msgspec.Struct, omit_defaults=True, gc=False):
    schema: int
    definition: str
    state: Any
    lanes: dict[str, list[LaneRecord]]
    retired: Retired = {}
    holes: dict[str, list[list[int | str]]] = {}
    time: int | None = None
    hole: int | None = None
    kept: dict[str, list[tuple[list[int | str], Any]]] = {}


class _Schema(msgspec.Struct, gc=False):
    schema: int


class StateRecord(msgspec.Struct, frozen=True):
    """A state with its histories and holes.

    Attributes:
        definition: Definition hash of the stage that made it.
        state: State of the fold as a JSON value; None when there are only holes.
        histories: Histories and holes.
        time_us: Latest event time that was folded, in microseconds since 1970; None in a stage whose states do not expire.
        hole_us: Latest event time of a hole in a stage whose states expire; the state stays as long as for a folded one.
        kept: States of the fold from before records that later stages have rejected, by group or original topic-partition,
            and position.
    """

    definition: str
    state: Any
    histories: Histories
    time_us: int | None = None
    hole_us: int | None = None
    kept: Mapping[str, Mapping[Position, Any]] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)
_schema_decoder = msgspec.json.Decoder(_Schema)


def encode_record(record: StateRecord) -> bytes:
    """Serialize a state record, checksum included."""
    active, retired = packed(record.histories.lanes)
    holes = {name: [list(one) for one in sorted(positions)] for name, positions in record.histories.holes.items()}
    kept = {name: [(list(at), state) for at, state in states.items()] for name, states in record.kept.items()}
    others = record.time_us, record.hole_us, kept
    return seal(_encoder.encode(_Record(SCHEMA, record.definition, record.state, active, retired, holes, *others)))


def decode_record(value: bytes, ref: StageRef, key: bytes) -> StateRecord:
    """Parse what `encode_record` wrote.

    Raises:
        Corrupt: It is damaged, is not a state record, or was written by another version.
    """
    try:
        body = unseal(value)
        schema = SCHEMA if body.startswith(_HEAD) else _schema_decoder.decode(body).schema
        if schema != SCHEMA:
            remedy = "Upgrade headwater" if schema > SCHEMA else ""
            raise Corrupt(f"the state has schema {schema}; this code reads {SCHEMA}", remedy, ref, key)
        record = _decoder.decode(body)
        histories = unpacked(record.lanes, record.retired)
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"the state cannot be read: {error}", ref=ref, key=key) from error
    holes = {name: frozenset(tuple(one) for one in positions) for name, positions in record.holes.items()}
    kept = {name: {tuple(at): state for at, state in states} for name, states in record.kept.items()}
    return StateRecord(record.definition, record.state, Histories(histories, holes), record.time, record.hole, kept)
