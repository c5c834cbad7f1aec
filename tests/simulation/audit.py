"""A second flow of a world, with its own store: it folds one of the topics again.

For the second flow, redriven dead letters of the first flow or of a republisher are copies, and vice versa: they are
neither folded nor dead letters.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import RunRefusedError
from aggregations.report import DeadLetter
from envelope import Reason
from envelope.limits import broker_id
from persistence.errors import StoreError
from persistence.names import FlowRef
from persistence.record import decode_record
from tests.simulation.driver import Driver
from tests.simulation.faults import Crash
from tests.simulation.functions import OUT, Payload, digest
from tests.simulation.kafka import Cluster
from tests.simulation.oracle import Violation
from tests.simulation.service import At, payload_of
from tests.simulation.stores import forget, open_store
from tests.simulation.topology import COLUMNS, Spec

AUDIT = "audit"
"""Name of the second flow."""
STAGES = ("a0", "a1")
_OTHERS = 15
"""Out of this many ids plus three, three are rejected: before the first stage, by it, and by the second."""


def refusal(payload: Payload) -> int:
    """Number of the place that rejects a payload; a higher number for none."""
    return _OTHERS + 3 if AUDIT in payload["fixed"] else _place(payload["id"])


def _place(name: str) -> int:
    return digest(name, AUDIT) % (_OTHERS + 3)


class Refusing:
    """A step before the first stage that rejects some elements."""

    def __call__(self, element: Element[Any]) -> Payload:
        payload: Payload = element.value
        if refusal(payload) == 0:
            raise ValueError("refused in front of the first stage")
        return payload


class Audited:
    """Counts how often each id was folded.

    Args:
        number: Number of its stage.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def zero(self) -> dict[str, int]:
        return {}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if refusal(element.value) == self.number + 1:
            raise ValueError("refused by this stage")
        state[element["id"]] = state.get(element["id"], 0) + 1
        return state


def flow_of(spec: Spec) -> Flow[Any]:
    """The second flow of a world."""
    topic = spec.audit
    flow = Flow(AUDIT).source(Topic(topic, Json(COLUMNS), envelope=not spec.is_raw(topic))).map(Refusing())
    keys = ("g", "h") if topic == OUT else ("k", "g")
    for number, (stage, key) in enumerate(zip(STAGES, keys, strict=True)):
        fold, kept = Audited(number), not spec.spreads(topic)
        flow = flow.aggregate(stage, key, fold, co_partitioned=kept, history=spec.history, lanes=spec.lanes)
    return flow


class Audit:
    """The running second flow.

    Args:
        spec: The world.
        cluster: The broker.
        url: URL of its store.
        publish: Puts a dead letter of it into the dead-letter topic.
        redriven: The reader that rejected a redriven record, by the record's place.

    Attributes:
        letters: Its dead letters in their topic, except ...
        again: ... those of redriven records that may have been folded, or have been mended once.
        fixed: Ids of its dead letters that were redriven.
        driver: The active run; None if there is none.
    """

    def __init__(
        self,
        spec: Spec,
        cluster: Cluster,
        url: str,
        publish: Callable[[DeadLetter, Flow[Any]], Record],
        redriven: Mapping[At, str],
    ) -> None:
        self.topic = spec.audit
        self.letters: list[Record] = []
        self.again: list[Record] = []
        self.fixed: set[str] = set()
        self.driver: Driver | None = None
        self._flow = flow_of(spec)
        self._cluster = cluster
        self._url = url
        self._store = open_store(self._url)
        self._publish_dead_letter = publish
        self._redriven = redriven
        self._dead: set[str] = set()

    @property
    def lag(self) -> int:
        """Number of unread records; at least one if it is not running."""
        return self.driver.lag if self.driver else 1

    def committed(self, partition: int) -> int:
        """Next offset of a partition in its manifest."""
        manifest = self._store.load_manifest(FlowRef(AUDIT))
        topic_id = self._cluster.topics[self.topic].topic_id
        if manifest is None or manifest.topic_ids.get(self.topic) != topic_id:
            return 0
        progress = manifest.positions.get(self.topic, {}).get(partition)
        return progress.next_offset if progress else 0

    def engine(self, limit: int) -> None:
        """Fold one batch; any failure ends the run.

        Raises:
            Violation: It refuses to start, or rejects a valid record.
        """
        try:
            driver, self.driver = self.driver or self._start(), None
        except RunRefusedError as refused:
            raise Violation(f"the second flow does not start: {refused}") from refused
        except (Crash, StoreError):
            return
        seen = len(driver.runner.dead_letters)
        try:
            driver.batch(limit)
            self.driver = driver
        except (Crash, StoreError):
            pass
        for letter in driver.runner.dead_letters[seen:]:
            self._died(letter)

    def _start(self) -> Driver:
        accept = ["topic-recreated", "beyond-end"]
        return Driver(self._flow, self._cluster, dict.fromkeys(STAGES, self._url), accept)

    def _died(self, letter: DeadLetter) -> None:
        at, name = letter.record, payload_of(letter.record.value)["id"]
        owner = self._redriven.get((broker_id(at.topic_id), at.partition, at.offset), AUDIT)
        if owner != AUDIT and name not in self._dead:
            raise Violation(f"{name} is a dead letter of the second flow, and a copy: {letter.reason}")
        place = self._publish_dead_letter(letter, self._flow)
        self._dead.add(name)
        if letter.reason is Reason.UNPROVEN:
            self.again.append(place)
            return
        if _place(name) > len(STAGES):
            raise Violation(f"{name} is a dead letter of the second flow, at stage {letter.stage}: {letter.reason}")
        (self.again if name in self.fixed else self.letters).append(place)

    def is_missing(self, name: str, stage: str) -> bool:
        """Whether an id is not folded at a stage."""
        return name not in self._held(STAGES.index(stage or STAGES[0]))

    def _held(self, number: int) -> dict[str, int]:
        ref = FlowRef(AUDIT).stage(STAGES[number])
        held: dict[str, int] = {}
        for key, one in self._store.stage(ref).items():
            for name, times in (decode_record(one.value, ref, key).state or {}).items():
                held[name] = held.get(name, 0) + times
        return held

    def compare(self, reached: Collection[str]) -> None:
        """Check that everything that was ever in the topic is folded once.

        Args:
            reached: Ids that were ever in it.

        Raises:
            Violation: An id is not folded once.
        """
        refused = {name: _place(name) for name in reached if name not in self.fixed}
        for number, stage in enumerate(STAGES):
            expected = {name: 1 for name in reached if refused.get(name, _OTHERS) > number + 1}
            found = self._held(number)
            for name in sorted(expected.keys() | found.keys()):
                if found.get(name, 0) != expected.get(name, 0):
                    raise Violation(
                        f"second flow, stage {stage}: {name} is folded {found.get(name, 0)} times, not {expected.get(name, 0)}"
                    )
        for name, place in refused.items():
            if place <= len(STAGES) and name not in self._dead:
                raise Violation(f"{name} is no dead letter of the second flow, which refuses it")

    def close(self) -> None:
        """Release its store."""
        forget(self._url)
