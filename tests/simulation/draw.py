"""Draws a world from a seed."""

from dataclasses import replace
from random import Random

from aggregations.definition.flow import END_OF_FLOW
from envelope.dedup.eviction import LANES
from tests.simulation.functions import OUT
from tests.simulation.topology import (
    CHANGED_KEY,
    FINAL,
    ONE_TOPIC,
    OVER_PARTITIONS,
    SECOND,
    SHORT,
    SPANNING,
    SPREAD_IDS,
    Processor,
    Spec,
    StageSpec,
)

_DISORDER = 512
"""A history large enough for any disorder in a world."""
_NUMBERED = ("sequence", "distinct", "sessions")
"""Filters that need numbers that ascend in the topic."""
_FAILING = ("", "", "", "map", "filter", "flat_map", "key", "divert", "divert")


def draw_spec(seed: int) -> Spec:
    """Draw a world with everything that worlds may have. What is added to a world has draws of its own."""
    spec = draw(Random(f"world {seed}"))
    spec = _draw_outputs(Random(f"outputs {seed}"), spec)
    spec = _draw_relay(Random(f"relay {seed}"), spec)
    spec = _draw_second(Random(f"second {seed}"), spec)
    spec = _draw_sessions(Random(f"sessions {seed}"), spec)
    spec = _draw_filter(Random(f"filter {seed}"), spec)
    spec = _draw_service_filters(Random(f"service filters {seed}"), spec)
    spec = _draw_repairs(Random(f"repairs {seed}"), spec)
    spec = _draw_rebuilds(Random(f"rebuilds {seed}"), spec)
    spec = _draw_stream(Random(f"stream {seed}"), spec)
    return _draw_cuts(Random(f"cuts {seed}"), spec)


def draw(random: Random) -> Spec:
    """Draw the topics, the services and the stages of a world."""
    trouble = random.choice([""] * 10 + ["spread", *["retries"] * 3, "foreign", "reorders", "undrained"])
    # A path that keeps the key is the ordinary case, with its own rules.
    kept_key = random.random() < 0.35
    roots, processors = _draw_processors(random, trouble, kept_key)
    topics = sorted({FINAL, *roots, *(processor.source for processor in processors)})
    drained = random.random() < (0.8 if kept_key else 0.2)
    growth = trouble if trouble == "undrained" else "drained" if drained else ""
    lags = kept_key and growth == "drained" and bool(processors)
    # So is a flow that is keyed as its topic is, whatever the services before it did.
    stages = _draw_stages(random, kept_key or random.random() < 0.6)
    keyless = not growth and random.random() < 0.3
    # Messages re-sent without a key go to any partition, until a service adds a key.
    scattered = keyless and any(one.rekey != "change" or one.spread for one in processors if one.source in roots)
    # If first deliveries ascend in every lane, and no message changes its lane, the smallest history is enough:
    # siblings without an index arrive in any order, but a history counts their roots.
    disorder = trouble not in ("", "foreign") or (bool(growth) and not kept_key) or scattered
    history = _DISORDER if disorder else random.choice([1, 1, 1, 2, 3, 32])
    spec = Spec(
        roots=roots,
        partitions={topic: random.choice([1, 2, 2, 3]) for topic in topics},
        processors=processors,
        stages=stages,
        history=None if trouble == "spread" else history,
        lanes=LANES if disorder or growth else random.choice([1, 2, LANES]),
        split=random.choice([len(stages), random.randint(1, len(stages)), random.randint(1, len(stages))]),
        growth=growth,
        recreates=trouble != "foreign" and random.random() < 0.25,
        reorders=trouble == "reorders",
        filters=random.random() < 0.2,
        publishes=random.random() < 0.3,
        keyless=keyless,
    )
    spec = spec if trouble or random.random() < 0.6 else _other(random, spec)
    spec = replace(spec, growth="lagging") if lags and random.random() < 0.9 else spec
    revives, audit = _draw_revival(random, spec), _draw_audit(random, spec)
    return replace(spec, audit=audit, revives=revives, mends=audit == OUT or random.random() < 0.3)


def _draw_outputs(random: Random, spec: Spec) -> Spec:
    """Move the publish step of some worlds before a stage."""
    # Before the first stage copies are published too. The second flow drops them if they keep their lanes.
    scattered = spec.growth or spec.keyless or spec.spreads(FINAL)
    stages = spec.stages[1:] if scattered else spec.stages
    if not (spec.publishes and stages) or random.random() < 0.5:
        return spec
    return replace(spec, publishes_before=random.choice(stages).name)


def _draw_stream(random: Random, spec: Spec) -> Spec:
    """Let Spark deliver the records of some worlds. A batch that has to be repeated as it was is another matter."""
    if spec.flow.notes_batches or random.random() < 0.8:
        return spec
    return replace(spec, streamed=random.randrange(1, 1 << 30))


def _draw_cuts(random: Random, spec: Spec) -> Spec:
    """Let logs of some worlds lose their newest records. What is passed on without a leader epoch would be a copy."""
    plain = not any(one.foreign or one.retries for one in spec.processors)
    other = spec.growth or spec.streamed or spec.repairs or spec.rebuilds
    return replace(spec, cuts=plain and not other and random.random() < 0.5)


def _draw_second(random: Random, spec: Spec) -> Spec:
    """Let the flow of some worlds read a second topic."""
    if random.random() < 0.7:
        return spec
    partitions = {**spec.partitions, SECOND: random.choice([1, 2, 2, 3])}
    return replace(spec, second=True, roots=(*spec.roots, SECOND), partitions=partitions)


def _draw_sessions(random: Random, spec: Spec) -> Spec:
    """Give the stages of some worlds sessions."""
    return replace(spec, sessions=spec.folds and random.random() < 0.2)


def _draw_relay(random: Random, spec: Spec) -> Spec:
    """Take the stages of some worlds away: their flow only publishes, and publishes copies, too.

    In some worlds a branch publishes what the flow publishes before a stage.
    """
    spec = replace(spec, aside=bool(spec.publishes_before) and random.random() < 0.5)
    if not spec.publishes or spec.growth or spec.keyless or spec.spreads(FINAL) or random.random() < 0.6:
        return spec
    fails = random.choice([one for one in _FAILING if one != "key"])
    relay = StageSpec(END_OF_FLOW, "g", flat=fails == "flat_map" or random.random() < 0.4, fails=fails)
    before = random.choice([END_OF_FLOW, ""])
    aside = bool(before) and random.random() < 0.5
    return replace(
        spec, stages=(relay,), split=1, publishes_before=before, folds=False, audit=OUT, mends=True, aside=aside
    )


def _draw_filter(random: Random, spec: Spec) -> Spec:
    """Put a filter before the stages of some worlds and let their producers write events twice.

    Both are in one partition: the filter looks for copies there. A second flow that reads what the filter reads would
    fold both. Numbers ascend only in topics that producers write, and only envelopes have a producer.
    """
    if not spec.processors and random.random() < 0.6:  # these are few, and the only ones for some filters
        audit = spec.audit if spec.audit == OUT else ""
        spec = replace(spec, keyless=False, recreates=False, sessions=False, audit=audit)
    scattered = spec.growth not in ("", "drained") or spec.keyless or spec.recreates or spec.audit not in ("", OUT)
    plain = all(not (one.spread or one.foreign or one.retries or one.refusing) for one in spec.processors)
    if scattered or not plain or not spec.folds or spec.sessions or random.random() < 0.4 * bool(spec.processors):
        return spec
    numbered = [] if spec.processors else [*_NUMBERED, *([] if spec.second else ["producer"])]
    spanning = [] if spec.second else [OVER_PARTITIONS]
    # A service that lags sends a copy to another partition than the event, if its target has grown in between.
    local = [] if spec.growth and spec.processors else ["event id", "interval"]
    kinds = [*local, *spanning, *numbered]
    return replace(spec, deduplicates=_variant(random, spec, random.choice(kinds))) if kinds else spec


def _variant(random: Random, spec: Spec, kind: str) -> str:
    """A filter of the drawn kind, or in some of the worlds one with other options."""
    apart = Random()
    apart.setstate(random.getstate())  # what is drawn after it stays as it is
    single = not spec.growth and not spec.second
    of_ids = [ONE_TOPIC] if spec.second else ["event id by key"] if single else []
    numbered = ["sequence by key", SHORT] if single else [SHORT]
    others = {
        OVER_PARTITIONS: [CHANGED_KEY, SPREAD_IDS],
        **dict.fromkeys(["event id", "interval"], of_ids),
        **dict.fromkeys(_NUMBERED, numbered),
    }.get(kind, [])
    return apart.choice(others) if others and apart.random() < (0.7 if spec.second else 0.3) else kind


def _draw_service_filters(random: Random, spec: Spec) -> Spec:
    """Give services of some worlds a filter and let producers write events twice for them.

    Both are in one partition: a filter looks for copies there. Numbers ascend only in topics that producers write, and only
    envelopes have a producer.
    """
    if spec.keyless or spec.deduplicates or random.random() < 0.6:
        return spec

    def drawn(one: Processor) -> str:
        numbered = [*_NUMBERED, *([] if one.raw else ["producer"])] if one.source in spec.roots else []
        return random.choice(["event id", "interval", *numbered]) if random.random() < 0.8 else ""

    return replace(spec, processors=tuple(replace(one, deduplicates=drawn(one)) for one in spec.processors))


def _draw_repairs(random: Random, spec: Spec) -> Spec:
    """Let states of some worlds be spoiled and mended; which of two duplicates a filter passes on must be known."""
    return replace(spec, repairs=spec.folds and spec.deduplicates not in SPANNING and random.random() < 0.3)


def _draw_rebuilds(random: Random, spec: Spec) -> Spec:
    """Let the states of some worlds be rebuilt; which of two duplicates a filter passes on must be known.

    If each of two generations gets a mended record from its own dead letter, both publish it, and the second time it is
    marked as missing: a reader folds it again if it does not hold its position any more (docs/guides/replay.md, Limits).
    """
    plain = spec.deduplicates != OVER_PARTITIONS and spec.audit != OUT
    return replace(spec, rebuilds=spec.folds and plain and random.random() < 0.12)


def _draw_audit(random: Random, spec: Spec) -> str:
    topics = [FINAL, *{processor.source: 0 for processor in spec.processors}, *([OUT] * 5 if spec.publishes else [])]
    audited = spec.growth in ("", "drained") and random.random() < (0.9 if spec.publishes else 0.4)
    return random.choice(topics) if audited else ""


def _draw_revival(random: Random, spec: Spec) -> bool:
    # Late messages may be unproven when redriven. For a stage that only counts, an operator could not decide them.
    known = all(stage.seen for stage in spec.stages) or spec.history == _DISORDER
    return known and random.random() < 0.7


def _other(random: Random, spec: Spec) -> Spec:
    """Make one processor another kind than headwater's, or make it write without a key."""
    ours = [one for one in spec.processors if not (one.plain or one.raw)]
    if not ours or spec.growth or spec.keyless:
        return spec
    one = random.choice(ours)
    processors = list(spec.processors)
    if random.random() < 0.5:
        processors[processors.index(one)] = replace(one, foreign=True, fan=5, rekey="keep")
        return replace(spec, processors=tuple(processors), history=1, recreates=False)
    processors[processors.index(one)] = replace(one, spread=True)
    return replace(spec, processors=tuple(processors), history=None, lanes=LANES)  # a retired lane holds nothing


def _draw_processors(random: Random, trouble: str, kept_key: bool) -> tuple[tuple[str, ...], tuple[Processor, ...]]:
    shape = random.choice(["direct", "line", "line", "line", "line", "diamond", "roots"])
    if shape == "direct":
        return (FINAL,), ()
    count = {"line": random.choice([1, 2, 2, 2, 3]), "diamond": 2, "roots": 2}[shape]
    topics = ["r0", *(f"m{i}" for i in range(1, count)), FINAL]
    troubled = random.randrange(count)
    ends = [(f"p{i}", topics[i], topics[i + 1]) for i in range(count)]
    roots: tuple[str, ...] = ("r0",)
    if shape == "diamond":
        mirror = random.randrange(count)
        ends.append(("q", topics[mirror], topics[mirror + 1]))
    if shape == "roots":
        roots = ("r0", "r1")
        ends.append(("q", "r1", random.choice(topics[1:])))
    raw = [root for root in roots if random.random() < 0.3 and root != FINAL]
    processors = [
        Processor(
            *end,
            rekey="keep" if kept_key else random.choice(["keep", "change", "change", "mixed"]),
            fan=random.choice([1, 1, 2, 3] if trouble != "foreign" else [2, 3]),
            spread=trouble == "spread" and i == troubled,
            foreign=trouble == "foreign" and i == troubled,
            retries=random.choice([0, 1, 1, 2]) if trouble == "retries" else 0,
            refusing=random.random() < 0.2,
            raw=end[1] in raw,
            static=random.random() < 0.3,
            also=FINAL if end[2] != FINAL and random.random() < 0.3 else "",
            members=random.choice([1, 1, 2, 3]),
        )
        for i, end in enumerate(ends)
    ]
    # Two that forward a message unchanged would make two messages that differ only in their paths.
    same = [one for one in processors if one.rekey == "keep" and one.fan == 1] if shape != "diamond" else []
    for one in same:
        if not (one.spread or one.retries or one.also) and random.random() < 0.5:
            processors[processors.index(one)] = replace(one, refusing=False, plain=True)
    return roots, tuple(processors)


def _draw_stages(random: Random, kept_key: bool) -> tuple[StageSpec, ...]:
    count = random.choice([1, 2, 2, 3])
    # A stage that only counts rejects nothing, and an operator could not find out whether it holds a message.
    counting = random.choice([0] * 6 + [1])
    return tuple(
        StageSpec(
            f"s{i}",
            key="k" if kept_key else random.choice(["k", "k", "g", "h"]),
            seen=i >= counting,
            flat=not kept_key and random.random() < 0.25,
            emits=i + 1 < count and random.random() < 0.2,
            fails=random.choice(_FAILING) if i >= counting else "",
            emit_fails=i >= counting and random.random() < 0.5,
        )
        for i in range(count)
    )
