"""The filters against oracles that remember everything, over random orders; and planted bugs that the oracles must find."""

import importlib
import json
import random
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from envelope import Verdict
from envelope.filters import Arrival, FilterStates, event_ids, index, interval, producers, sequence

SEEDS = range(100)
S = 10  # interval, gap, size and horizon
DISTINCT = importlib.import_module("envelope.filters.distinct")  # the package has a function of this name

DROPPED = (Verdict.DUPLICATE, Verdict.BELOW_FLOOR, Verdict.FENCED, Verdict.HELD)

Modules = dict[str, Any]
REAL: Modules = {"sequence": sequence, "interval": interval, "distinct": DISTINCT, "event_ids": event_ids}
REAL |= {"producers": producers, "index": index}


def milliseconds(number: int) -> timedelta:
    return timedelta(milliseconds=number)


def history(seed: int, *, spread: int = 6 * S, count: int = 60) -> list[Arrival]:
    """Records of few keys whose times rise and jump back and forth, in one partition."""
    draw = random.Random(seed)
    now, made = 0, []
    step = draw.choice([1, 3, S])
    for offset in range(count):
        now += draw.randrange(step + 1)
        time = now - draw.choice([0, 0, 0, draw.randrange(spread)])
        key = draw.choice([b"a", b"b", b"c", None]) if draw.random() < 0.95 else b"rare"
        made.append(Arrival("t", 0, offset, key, draw.randrange(12), time))
    return made


def judged(rule: Any, records: list[Arrival], seed: int) -> list[tuple[Arrival, Any]]:
    """The rulings, with restarts from JSON in between."""
    draw, states, rulings = random.Random(seed + 1), FilterStates(rule), []
    for record in records:
        ruling = states.judge(record)
        assert not (ruling.forward and (ruling.verdict in DROPPED or ruling.verdict.diverts))
        rulings.append((record, ruling))
        if draw.random() < 0.2:
            stored = {scope: json.dumps(value) for scope, value in states.dump().items()}
            states = FilterStates(rule, {scope: json.loads(text) for scope, text in stored.items()})
            assert {scope: json.dumps(value) for scope, value in states.dump().items()} == stored
    return rulings


def check_sequence(modules: Modules, seed: int) -> None:
    rule = modules["sequence"].SequenceFilter(lambda one: one.value)
    seen: list[int] = []
    for record, ruling in judged(rule, history(seed), seed):
        assert ruling.forward is (not seen or record.value > max(seen))
        seen.append(record.value)


def check_interval(modules: Modules, seed: int) -> None:
    """Every record is compared with every record that was passed on, within the interval of stream time."""
    rule = modules["interval"].deduplicate_by_key(milliseconds(S))
    remembered: list[Arrival] = []
    times: list[int] = []
    for record, ruling in judged(rule, history(seed), seed):
        times.append(record.timestamp_ms)
        oldest = max(times) - S
        same = [one for one in remembered if one.key == record.key and one.timestamp_ms >= oldest]
        duplicate = any(abs(one.timestamp_ms - record.timestamp_ms) <= S for one in same)
        assert ruling.forward is (record.key is None or not duplicate), record
        late = record.timestamp_ms < oldest and not duplicate and record.key is not None
        assert (ruling.verdict is Verdict.BEYOND_HORIZON) is late
        if ruling.forward and record.key is not None and record.timestamp_ms >= oldest:
            remembered.append(record)


def check_tumbling(modules: Modules, seed: int) -> None:
    module = modules["distinct"]
    rule = module.distinct(module.TimeWindows(milliseconds(S), milliseconds(2 * S)))
    opened: set[tuple[bytes, int]] = set()
    now = None
    for record, ruling in judged(rule, history(seed), seed):
        now = record.timestamp_ms if now is None else max(now, record.timestamp_ms)
        if record.key is None:
            assert ruling.forward
            continue
        number = record.timestamp_ms // S
        late = (number + 1) * S <= now - 2 * S
        assert ruling.forward is ((record.key, number) not in opened and not late)
        opened |= set() if late else {(record.key, number)}


def check_session(modules: Modules, seed: int) -> None:
    """Sessions are made anew of all times that a session may still consist of."""
    gap, grace = 3, 2 * S
    module = modules["distinct"]
    rule = module.distinct(module.SessionWindows(milliseconds(gap), milliseconds(grace)))
    times: dict[bytes, list[int]] = {}
    now = None
    for record, ruling in judged(rule, history(seed), seed):
        now = record.timestamp_ms if now is None else max(now, record.timestamp_ms)
        closed = now - gap - grace
        for key, found in times.items():
            times[key] = [time for one in sessions(found, gap) if one[-1] >= closed for time in one]
        if record.key is None:
            assert ruling.forward
            continue
        own = times.setdefault(record.key, [])
        joins = any(abs(time - record.timestamp_ms) <= gap for time in own)
        late = not joins and record.timestamp_ms < closed
        assert ruling.forward is (not joins and not late), record
        if not late:
            own.append(record.timestamp_ms)


def sessions(times: list[int], gap: int) -> list[list[int]]:
    made: list[list[int]] = []
    for time in sorted(times):
        if made and time - made[-1][-1] <= gap:
            made[-1].append(time)
        else:
            made.append([time])
    return made


def check_event_ids(modules: Modules, seed: int) -> None:
    """Copies have the id and the time of their event. What the filter says is new is new, and what it drops is not."""
    draw = random.Random(seed)
    limit = draw.choice([4, 1000])
    events = [(f"e{n}", max(0, n - draw.choice([0, 0, draw.randrange(3 * S)]))) for n in range(60)]
    arrivals: list[tuple[str, int]] = []
    for n, event in enumerate(events):
        arrivals.append(event)
        if draw.random() < 0.5:
            arrivals.append(events[draw.randrange(n + 1)])
    records = [Arrival("t", 0, n, b"k", identity, time) for n, (identity, time) in enumerate(arrivals)]
    rule = modules["event_ids"].EventIdFilter(lambda one: one.value, milliseconds(S), limit=limit)
    passed: set[str] = set()
    now, uncertain = 0, 0
    for record, ruling in judged(rule, records, seed):
        now = max(now, record.timestamp_ms)
        if ruling.verdict is Verdict.BEYOND_HORIZON:
            uncertain += 1
            assert limit == 4 or record.timestamp_ms < now - S, "within the horizon the filter is exact"
        else:
            assert ruling.forward is (record.value not in passed)
        passed.add(record.value)
    state = FilterStates(rule)
    for record in records:
        state.judge(record)
        assert len(state.state(b"t:0").ids) <= min(limit, 2 * S + 61)
    oldest = min((time for time, *_ in state.dump()[b"t:0"]["ids"]), default=now)
    assert oldest >= now - S


def stamped(module: Any, seed: int, *, contiguous: bool) -> list[Arrival]:
    """Producers whose sends overtake each other and come again."""
    draw = random.Random(seed)
    made: list[Arrival] = []
    sent: dict[str, list[Any]] = {"p": [], "q": []}
    following = dict.fromkeys(sent, 0)
    waiting: list[tuple[int, Any]] = []
    for n in range(60):
        producer = draw.choice("pq")
        if sent[producer] and draw.random() < 0.3:
            stamp = draw.choice(sent[producer])
            if not contiguous and draw.random() < 0.3:  # the producer makes other batches when it sends again
                stamp = module.Stamp(producer, stamp.sequence, stamp.end + 1)
        else:
            first = following[producer] + (0 if contiguous else draw.randrange(3))
            last = first + draw.choice([0, 0, 2])
            following[producer] = last + 1
            stamp = module.Stamp(producer, first, last, contiguous=contiguous)
            sent[producer].append(stamp)
        waiting.append((n + draw.choice([0, 0, 0, draw.randrange(8)]), stamp))
    for offset, (_, stamp) in enumerate(sorted(waiting, key=lambda one: one[0])):
        made.append(Arrival("t", 0, offset, b"k", stamp, offset))
    return made


def numbers(stamp: Any) -> range:
    return range(stamp.sequence, stamp.end + 1)


def check_holes(modules: Modules, seed: int) -> None:
    rule = modules["producers"].ProducerFilter(lambda one: one.value)
    highest: dict[str, int] = {}
    for record, ruling in judged(rule, stamped(modules["producers"], seed, contiguous=False), seed):
        stamp = record.value
        before = highest.get(stamp.producer)
        assert ruling.forward is (before is None or stamp.sequence > before)
        assert ruling.verdict.diverts is (before is not None and stamp.sequence <= before < stamp.end)
        if ruling.forward:
            highest[stamp.producer] = stamp.end


def check_gaps(modules: Modules, seed: int) -> None:
    """No number is passed on twice, every number from the first one on is passed on, and duplicates are proven."""
    rule = modules["producers"].ProducerFilter(lambda one: one.value)
    passed: dict[str, set[int]] = {"p": set(), "q": set()}
    first: dict[str, int] = {}
    for record, ruling in judged(rule, stamped(modules["producers"], seed, contiguous=True), seed):
        stamp = record.value
        known = first.setdefault(stamp.producer, stamp.sequence)
        own = passed[stamp.producer]
        assert ruling.forward is (stamp.sequence >= known and not own & {*numbers(stamp)}), (record, ruling)
        if ruling.verdict is Verdict.GAP:
            assert ruling.missing == (max(own) + 1, stamp.sequence - 1)
        if ruling.verdict is Verdict.DUPLICATE:
            assert own >= {*numbers(stamp)}
        if ruling.verdict is Verdict.BELOW_FLOOR:
            assert stamp.sequence < known
        own |= {*numbers(stamp)} if ruling.forward else set()


def check_held(modules: Modules, seed: int) -> None:
    """What comes out of a producer is a run of numbers without a gap, each once, and nothing that arrived is missing."""
    module = modules["producers"]
    records = stamped(module, seed, contiguous=True)
    rule = module.ProducerFilter(lambda one: one.value, gaps=module.Gaps.HOLD)
    out: dict[str, list[int]] = {"p": [], "q": []}
    arrived: dict[str, set[int]] = {"p": set(), "q": set()}
    for record, ruling in judged(rule, records, seed):
        arrived[record.value.producer] |= {*numbers(record.value)}
        for one in [record] * ruling.forward + [records[offset] for offset in ruling.released]:
            out[one.value.producer] += numbers(one.value)
        for producer, found in out.items():
            assert found == [*range(found[0], found[-1] + 1)] if found else True
            assert not found or found[-1] + 1 not in arrived[producer]


CHECKS: dict[str, Callable[[Modules, int], None]] = {
    name.removeprefix("check_"): one for name, one in list(globals().items()) if name.startswith("check_")
}

# Check, module, what the code says, what the bug makes of it.
PLANTED = [
    ("sequence", "sequence", "number > state.seen", "number >= state.seen"),
    ("sequence", "sequence", "state.seen is None or", "state.seen is not None and"),
    ("sequence", "sequence", 'LastSeen(value["seen"],', "LastSeen(None,"),
    ("interval", "interval", "<= self.interval_ms", "< self.interval_ms"),
    ("interval", "interval", "purge(now - self.interval_ms)", "purge(now - self.interval_ms + 1)"),
    ("interval", "interval", "abs(time - found[0])", "(time - found[0])"),
    ("interval", "interval", "max(before, time)", "time"),
    ("interval", "interval", "if time < now - self.interval_ms", "if time <= now - self.interval_ms"),
    ("interval", "interval", "        if time < now - self.interval_ms:\n            return _BEYOND, state\n", ""),
    ("interval", "interval", "        if identity is None:\n            return UNIDENTIFIED, state\n", ""),
    ("interval", "interval", 'IntervalState(value["stream_time_ms"]', "IntervalState(None"),
    ("tumbling", "distinct", "start + self.size_ms", "start + self.size_ms - 1"),
    ("tumbling", "distinct", "now - self.grace_ms + 1", "now"),
    ("tumbling", "distinct", "window.end_ms <= now - self.grace_ms", "window.end_ms < now - self.grace_ms"),
    ("tumbling", "distinct", "(arrival.key, window.start_ms)", "(arrival.key, 0)"),
    ("session", "distinct", "<= time_ms <= one[1] + gap_ms", "<= time_ms < one[1] + gap_ms"),
    ("session", "distinct", "one[0] - gap_ms <= time_ms", "one[0] <= time_ms"),
    ("session", "distinct", "time < closed", "time <= closed"),
    ("session", "distinct", "max(time_ms, near[-1][1])", "near[-1][1]"),
    ("session", "distinct", "near[-1][1])", "near[0][1])"),
    ("session", "distinct", "session[1] >= before_ms", "session[1] > before_ms"),
    ("session", "distinct", "self._schedule(key, min(end for _, end in kept))", "pass"),
    ("event_ids", "event_ids", "time <= state.floor_ms", "time < state.floor_ms"),
    ("event_ids", "event_ids", "state.floor_ms = forgotten ", "state.floor_ms = None "),
    ("event_ids", "event_ids", 'value["floor_ms"]', "None"),
    ("event_ids", "event_ids", ", self.limit)", ")"),
    ("holes", "producers", "if end <= known.highest", "if end < known.highest"),
    ("holes", "producers", "if first <= known.highest", "if False"),
    (
        "holes",
        "producers",
        "known.highest, known.exact_from, known.missing, known.held = highest,",
        "_, _, _, _ = highest,",
    ),
    ("gaps", "producers", "known.missing.append((known.highest + 1", "known.missing.append((known.highest + 2"),
    ("gaps", "producers", "DUPLICATE if first >= known.exact_from else _BELOW", "DUPLICATE"),
    ("gaps", "producers", "one for one in known.missing if one != near[0]", "one for one in known.missing"),
    ("gaps", "producers", "[(low, first - 1), (end + 1, high)]", "[]"),
    (
        "gaps",
        "producers",
        "first == known.highest + 1:\n            known.highest = end",
        "True:\n            known.highest = end",
    ),
    ("held", "producers", "known.held[0][0] == known.highest + 1", "known.held"),
    ("held", "producers", "return _also(ACCEPTED, _ready(known))", "return ACCEPTED"),
    ("held", "producers", "bisect_left(known.held, (first, end, offset))", "0"),
    ("held", "producers", 'value.get("held", ())', "()"),
]


def planted(module: ModuleType, said: str, says: str) -> ModuleType:
    """The module with a bug."""
    text = importlib.util.find_spec(module.__name__).loader.get_source(module.__name__)
    assert said in text, f"{module.__name__} no longer says {said!r}"
    wrong = ModuleType(f"{module.__name__}_planted")
    exec(compile(text.replace(said, says), f"planted in {module.__name__}", "exec"), vars(wrong))
    return wrong


def fails(check: Callable[[Modules, int], None], modules: Modules, seed: int) -> bool:
    try:
        check(modules, seed)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", CHECKS)
def test_a_filter_decides_as_an_oracle_that_remembers_everything(name: str) -> None:
    for seed in SEEDS:
        CHECKS[name](REAL, seed)


@pytest.mark.parametrize(("name", "module"), sorted({one[:2] for one in PLANTED}))
def test_a_module_without_a_planted_bug_passes(name: str, module: str) -> None:
    modules = {**REAL, module: planted(REAL[module], "import", "import")}
    for seed in SEEDS:
        CHECKS[name](modules, seed)


@pytest.mark.parametrize(("name", "module", "said", "says"), PLANTED)
def test_a_planted_bug_is_found(name: str, module: str, said: str, says: str) -> None:
    modules = {**REAL, module: planted(REAL[module], said, says)}
    assert any(fails(CHECKS[name], modules, seed) for seed in range(500)), "no history shows the difference"
