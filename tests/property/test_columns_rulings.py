"""Compiled code judges rows, and writes states, as the filters do: verdict by verdict, and byte for byte."""

import random
from collections.abc import Sequence
from datetime import timedelta
from itertools import count, islice
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import polars as pl
import pytest

from aggregations.columns import schema
from aggregations.columns.judge import VERDICTS
from aggregations.columns.judging import rulings_of, stamped
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.records import StoredStates, form_of
from aggregations.definition.headers import header_column, last_value
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.per_message.judging import ruled
from envelope import Histories
from envelope.filters import (
    Arrival,
    Beyond,
    Decreasing,
    EventIdFilter,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    Stamp,
    TimeWindows,
    Unusable,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
    from_header,
    from_value,
)
from envelope.filters.distinct import DistinctSession, DistinctTumbling
from envelope.filters.interval import IntervalFilter
from persistence.record import StateRecord, encode_record

TEN = timedelta(milliseconds=10)
IDS, NUMBERS = from_envelope("event_id"), from_envelope("sequence")
ALL = {"accepted", "late", "duplicate", "beyond_horizon", "unidentified"}
NUMBERED = {"accepted", "duplicate", "below_floor", "fenced", "unidentified"}
FILTERS: dict[str, tuple[Any, set[str]]] = {
    "sequence": (SequenceFilter(NUMBERS), {"accepted", "duplicate", "below_floor", "rejected"}),
    "sequence, column": (
        SequenceFilter(from_value("id"), decreasing=Decreasing.REJECT),
        {"accepted", "duplicate", "rejected"},
    ),
    "sequence by key": (
        SequenceFilter(NUMBERS, scope_by=Scope.KEY, unusable=Unusable.FORWARD),
        {"accepted", "duplicate", "below_floor", "unidentified"},
    ),
    "sequence, header": (SequenceFilter(from_header("number")), {"accepted", "duplicate", "below_floor", "rejected"}),
    "sequence, text": (
        SequenceFilter(from_value("text"), unusable=Unusable.FORWARD),
        {"accepted", "duplicate", "below_floor", "unidentified"},
    ),
    "event id": (EventIdFilter(IDS, TEN), ALL),
    "event id, header": (EventIdFilter(from_header("id"), TEN), ALL),
    "event id, unsigned": (EventIdFilter(from_value("big"), TEN), {*ALL, "rejected"}),
    "event id, number": (EventIdFilter(from_value("id"), TEN, limit=3, beyond=Beyond.DROP), ALL),
    "event id by key": (
        EventIdFilter(IDS, TEN, beyond=Beyond.REJECT, scope_by=Scope.KEY),
        {*ALL, "rejected"} - {"beyond_horizon"},
    ),
    "event id, time": (EventIdFilter(IDS, TEN, limit=20, time=from_value("ms")), ALL),
    "interval by key": (deduplicate_by_key(TEN), ALL),
    "interval": (deduplicate_by_key_value(IDS, TEN), ALL),
    "interval, number": (deduplicate_by_key_value(from_value("id"), TEN), ALL),
    "interval, header": (deduplicate_by_key_value(from_header("id"), TEN), ALL),
    "interval over partitions": (deduplicate(IDS, TEN, partitions=2), ALL),
    "interval by a changed key": (
        deduplicate_by_key_value(from_value("id"), TEN, key=from_value("text"), partitions=2),
        ALL,
    ),
    "event id over partitions": (EventIdFilter(IDS, TEN, partitions=2), ALL),
    "tumbling": (distinct(TimeWindows(TEN, grace=TEN)), ALL),
    "tumbling by key": (distinct(TimeWindows(TEN, grace=TEN), scope_by=Scope.KEY), ALL),
    "tumbling, time": (distinct(TimeWindows(TEN / 5, grace=TEN * 0), time=from_value("ms")), ALL),
    "sessions": (distinct(SessionWindows(TEN / 5, grace=TEN)), ALL),
    "sessions by key": (distinct(SessionWindows(TEN / 5, grace=TEN), scope_by=Scope.KEY), ALL),
    "sessions, no grace": (distinct(SessionWindows(TEN / 10, grace=TEN * 0)), ALL - {"late"}),
    "producer": (ProducerFilter(), {*NUMBERED, "gap", "late", "rejected"}),
    "producer, expiry": (ProducerFilter(expiry=TEN * 4, limit=3), {*NUMBERED, "gap", "late", "rejected"}),
}

LEFT = {
    SequenceFilter: 0.01,
    EventIdFilter: 0.4,
    IntervalFilter: 0.4,
    DistinctTumbling: 0.4,
    DistinctSession: 0.4,
    ProducerFilter: 0.97,
}
"""Share of the rows that may be left to the filter itself: texts that JSON escapes, the lowest integer, gaps, forgotten
producers."""


class Row(Arrival):
    """A record with the attributes of an element."""

    stamp: Stamp | None = None
    event_id: str = ""
    chained: bool = False


class Log:
    """Draws the records of some partitions: mostly rising times and numbers, some ids again."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.offsets = [0, 0, 0]
        self.numbers: dict[tuple[int, str], int] = {}
        self.odd = self.draw.random() < 0.3

    def rows(self, count: int) -> list[Row]:
        return [self.row(self.draw.randrange(3)) for _ in range(count)]

    def row(self, partition: int) -> Row:
        draw = self.draw
        self.offsets[partition] = offset = self.offsets[partition] + 1
        back = draw.choice([0, 0, 0, 0, 1, 3, 9, 15, 40])
        keys = [b"k%d" % partition, b"n-%d:%d" % (partition, offset), None, b"\xff%" if self.odd else b"Z z"]
        text = draw.choice(["", f"e{offset - back}", f"e{offset - back}", f'"{back}\\' if self.odd else f"\x7fé{back}"])
        number = None if draw.random() < 0.1 else offset - back
        big = 1 << 63 if self.odd and draw.random() < 0.1 else None if number is None else abs(number)
        digits = draw.choice(
            [f"{number}", f"{number}", "", "+", f"{1 << 63}", f"{-(1 << 63)}", "1²"][: 7 if self.odd else 3]
        )
        headers = [("id", text.encode() or None), ("number", digits.encode("latin-1")), ("id", b"first")]
        if draw.random() < 0.5:
            headers.append(("id", text.encode() or None))
        made = Row(
            "t",
            partition,
            offset,
            draw.choice(keys),
            {"id": number, "ms": offset // 2 - back, "big": big, "text": digits if number else None},
            offset // 2 - draw.choice([0, 0, 0, 7, 25]),
            tuple(headers[draw.choice([0, 0, 0, 1, 4]) :]),
        )
        stamp = None if draw.random() < 0.1 else self.stamp(partition, back)
        object.__setattr__(made, "stamp", stamp)
        object.__setattr__(made, "event_id", text)
        return made

    def stamp(self, partition: int, back: int) -> Stamp:
        name = self.draw.choice(["", "till", "till-2", "pump", "gate"])
        at = self.numbers.get((partition, name), 0)
        first = at + 1 - back + (self.draw.choice([0, 0, 3]) if name == "pump" else 0)
        if not self.odd:
            first = at + 1 if name == "gate" else first  # a contiguous producer that leaves no gaps
        last = None
        if name == "till-2" and not back:
            last = first - 1 if self.odd and self.draw.random() < 0.1 else first + 1
        self.numbers[partition, name] = max(at, first if last is None else last)
        return Stamp(name, first, last, self.draw.choice([0, 0, 0, 1]), name == "gate")


class Judge:
    """Judges batches by compiled code and, if that leaves them, row by row."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.texts: dict[bytes, bytes] = {}
        self.left = 0
        self.warnings: list[str] = []

    def batch(self, rows: Sequence[Row]) -> list[tuple[str, bool, str]]:
        scopes = [self.rule.scope(one) or b"none" for one in rows]
        keys = sorted(set(scopes))
        order = sorted(range(len(rows)), key=lambda i: (scopes[i], i))
        mine = [rows[i] for i in order]
        codes = np.array([keys.index(scopes[i]) for i in order], np.int64)
        form = form_of("d", None)
        stored = StoredStates([self.record(key) for key in keys], form, LaneNames())

        def subjects(some: Any) -> list[Row]:
            self.left += len(some)
            return [mine[row] for row in some]

        found = rulings_of(self.rule, inputs_of(mine), subjects, codes, stored)
        values = found.values
        self.warnings += found.warnings
        for code in set(codes.tolist()):
            self.texts[keys[code]] = found.texts[values.first[0, code] : values.last[0, code]]
        told: list[Any] = [None] * len(rows)
        for place, row in enumerate(order):
            cause = found.rejected.get(place)
            detail = "" if cause is None else f"{cause.reason}: {cause.detail}"
            told[row] = (VERDICTS[found.verdicts[place]], bool(found.forward[place]), detail)
        return told

    def record(self, key: bytes) -> bytes | None:
        if key not in self.texts:
            return None
        return encode_record(StateRecord("d", msgspec.Raw(self.texts[key]), Histories()))


def inputs_of(rows: Sequence[Row]) -> pl.DataFrame:
    stamps = [
        None if one.stamp is None else {name: getattr(one.stamp, name) for name in schema.STAMP_NAMES} for one in rows
    ]
    found = pl.DataFrame(
        [
            pl.Series(schema.TOPIC, [one.topic for one in rows], pl.String),
            pl.Series(schema.PARTITION, [one.partition for one in rows], pl.Int32),
            pl.Series(schema.KEY, [one.key for one in rows], pl.Binary),
            pl.Series(schema.OFFSET, [one.offset for one in rows], pl.Int64),
            pl.Series(schema.TIMESTAMP, [one.timestamp_ms for one in rows], pl.Int64),
            pl.Series(stamped("event_id"), [one.event_id or None for one in rows], pl.String),
            pl.Series(stamped("sequence"), [one.stamp and one.stamp.sequence for one in rows], pl.Int64),
            pl.Series(schema.STAMP, stamps, schema.STAMPS),
            pl.Series("ms", [one.value.get("ms", 0) for one in rows], pl.Int64),
            pl.Series("id", [one.value["id"] for one in rows], pl.Int64),
            pl.Series("big", [one.value.get("big") for one in rows], pl.UInt64),
            pl.Series("text", [one.value.get("text") for one in rows], pl.String),
            pl.Series(
                schema.HEADERS,
                [[{"key": name, "value": value} for name, value in one.headers] for one in rows],
                SYSTEM_COLUMNS[schema.HEADERS],
            ),
        ]
    )
    return found.with_columns(last_value(name).alias(header_column(name)) for name in ("id", "number"))


class Plain:
    """Judges row by row."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.states: dict[bytes, Any] = {}

    def batch(self, rows: Sequence[Row]) -> list[tuple[str, bool, str]]:
        found = []
        for row in rows:
            scope = self.rule.scope(row)
            state = self.states.setdefault(scope or b"none", self.rule.zero())
            if scope is None:
                found.append(("unidentified", True, ""))
                continue
            ruling, self.states[scope] = self.rule.judge(state, row)
            found.append((ruling.verdict, ruling.forward, f"{ruling.reason}: {ruling.detail}" if ruling.reason else ""))
        return found


@pytest.mark.parametrize("name", FILTERS)
def test_rulings_and_states_are_those_of_the_filter(name: str) -> None:
    rule, verdicts = FILTERS[name]
    rows, left, met = 0, 0, set()
    for seed in range(60):
        log, judge, plain = Log(seed), Judge(rule), Plain(rule)
        for _ in range(6):
            batch = log.rows(log.draw.choice([1, 5, 40, 120]))
            wanted = plain.batch(batch)
            assert judge.batch(batch) == wanted, seed
            states = {key: msgspec.json.encode(rule.dump(state)) for key, state in plain.states.items()}
            assert judge.texts == states, seed
            met |= {verdict for verdict, _, _ in wanted}
            rows += len(batch)
        left += judge.left
    assert met == verdicts
    assert left / rows <= LEFT[type(rule)]


def test_a_warning_is_given_once_for_each_state() -> None:
    judge = Judge(SequenceFilter(NUMBERS))
    for start in (1, 6, 11):
        rows = [Row("t", 0, number, b"order-%d" % number, {"id": number}) for number in range(start, start + 5)]
        for row in rows:
            object.__setattr__(row, "stamp", Stamp("till", row.offset or 0))
        judge.batch(rows)
    assert judge.texts == {b"t:0": b'{"seen":15,"keyed":8}'}
    assert (len(judge.warnings), judge.left) == (1, 0)


@pytest.mark.parametrize("rule", [deduplicate_by_key(TEN), deduplicate(from_value("id"), TEN, partitions=1)])
def test_a_record_at_the_offset_of_a_remembered_one_is_a_duplicate(rule: Any) -> None:
    """Its position is not held, so it is a record of a topic that was created again."""
    rows = [Row("t", 0, 3, b"k", {"id": 1}, time) for time in (20, 21, 9)]
    judge, alone = Judge(rule), rule.zero()
    told = []
    for row in rows:
        ruling, alone = ruled(rule, alone, row)
        told.append((ruling.verdict, ruling.forward, ""))
    assert [judge.batch([row]) for row in rows] == [[one] for one in told]
    assert [forward for _, forward, _ in told] == [True, False, False]
    assert judge.left == 0


def test_ids_that_were_chosen_to_collide_are_left_to_the_filter() -> None:
    numbers = (number for number in count(1_000_000) if google_crc32c.value(b"%d" % number) % 4096 == 77)
    chosen = list(islice(numbers, 1_100))
    rows = [Row("t", 0, at, b"k", {"id": number}, 5) for at, number in enumerate([*chosen, *chosen[:7]])]
    rule = EventIdFilter(from_value("id"), TEN)
    judge, plain = Judge(rule), Plain(rule)
    assert judge.batch(rows) == plain.batch(rows)
    assert judge.left == len(rows)
    few = Judge(rule)
    few.batch(rows[:900])
    assert few.left == 0
