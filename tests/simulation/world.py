"""One simulated world: processes, stores and topics, run step by step and checked after each."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from aggregations import report
from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.risks import Risk
from envelope import Node, Reason, decode
from envelope.dedup.lineage import died_in
from persistence.commit import faults
from persistence.errors import StoreError, StoreWentBack, Transient
from persistence.growth import GROWN_UNDRAINED
from persistence.kafka import BrokerError
from persistence.kafka.facts import BEYOND_END
from persistence.record import decode_record
from tests.simulation.audit import AUDIT, Audit
from tests.simulation.changes import Change, changed
from tests.simulation.clients import simulated_clients
from tests.simulation.driver import Driver
from tests.simulation.faults import Crash, End, Faults, Process, Script
from tests.simulation.functions import OUT, OUTAGE, Payload
from tests.simulation.kafka import Cluster
from tests.simulation.letters import brought_back, facts_of, is_like, record_of
from tests.simulation.live import Live
from tests.simulation.oracle import Oracle, Violation
from tests.simulation.service import At, Outgoing, Service, payload_of, published, rooted
from tests.simulation.stores import SCHEME, Copy, SimulatedStore, forget, open_store
from tests.simulation.stream import Checkpoint
from tests.simulation.topology import FLOW, Spec, event
from tests.simulation.watch import Watch

_ENDLESS = 200
_NOTHING: tuple[object, ...] = (None, {}, [], {"n": 0, "s": 0})
"""States of keys for which nothing was folded: they contain only the hole of a dead letter."""
_names = count()


class World:
    """A running world.

    Args:
        spec: Its content.

    Attributes:
        cluster: The broker.
        services: The republishers.
        stores: Store by URL, upstream first.
        oracle: The expected results.
        watch: The invariants.
        driver: The active engine; None if there is none.
        zombies: Suspended engines, each with its script.
        stale: Suspended services, each with its script.
        copies: Copies of all stores.
        audit: The second flow; None if there is none.
        letters: The flow's dead letters in their topic, except ...
        again: ... those of redriven records that may have been folded, or have been mended once.
        redriven_at: The reader that rejected a redriven record, by the record's place.
        slow: Partition of the flow's topic that lags; negative for none.
        reached: Ids that were ever in each topic.
        redriven: Number of dead letters redriven so far, in the order of their topic, by the reader that rejected them.
        replayable: The flow's topic can be read again from its beginning.
        live: The live generation.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.cluster = Cluster()
        for topic, partitions in spec.partitions.items():
            self.cluster.create(topic, partitions)
        for processor in spec.processors:
            for topic in (*processor.retry_topics, processor.dead):
                self.cluster.create(topic, 1)
        self.cluster.create("dead", 1)
        self.cluster.create(OUT, 2)
        accept = (*([GROWN_UNDRAINED] * (spec.growth == "undrained")), *([BEYOND_END] * spec.cuts))
        name = f"{SCHEME}://w{next(_names)}"
        self._filters = f"{name}.filters"
        of = (self.cluster, self.deliver, spec.reorders, accept, self._filters)
        self.services = [Service(processor, *of) for processor in spec.processors]
        self.urls = spec.urls(name)
        self.stores: dict[str, SimulatedStore] = {url: open_store(url) for url in dict.fromkeys(self.urls.values())}
        self.oracle = Oracle(spec)
        self.watch = Watch(spec, self.oracle, [self.stores[self.urls[stage.name]] for stage in spec.stages])
        self.driver: Driver | None = None
        self.zombies: list[tuple[Process, Script]] = []
        self.stale: list[tuple[Process, Script]] = []
        self.copies: list[dict[str, Copy]] = []
        self._checkpoint = Checkpoint(spec.streamed) if spec.streamed else None
        self.redriven_at: dict[At, str] = {}
        self.audit: Audit | None = None
        if spec.audit:
            self.audit = Audit(spec, self.cluster, f"{name}.second", self.publish_dead_letter, self.redriven_at)
        self.letters: list[Record] = []
        self.again: list[Record] = []
        self.reached: defaultdict[str, set[str]] = defaultdict(set)
        self.redriven: Counter[str] = Counter()
        self.slow = -1
        self.replayable = True
        self.live = Live(self)
        self._faults = Faults()
        self._drivers: list[tuple[Driver, int, int]] = []

    def home(self, stage: str) -> SimulatedStore:
        """The store of a stage."""
        return self.stores[self.urls[stage]]

    def run(self, steps: Iterable[Callable[["World"], object]]) -> None:
        """Take steps with a check after each; then let everything recover, and compare with the plain fold.

        Raises:
            Violation: An invariant does not hold; the text says which.
        """
        OUTAGE.over = False
        with faults.use(self._faults), simulated_clients():
            try:
                for step in steps:
                    step(self)
                    self.check()
                self.resolve()
                self.compare()
                if self.zombies or self.stale:
                    self._wake_all()
                    self.resolve()
                    self.compare()
            finally:
                self.close()

    def close(self) -> None:
        """Release threads and stores."""
        for process, _ in [*self.zombies, *self.stale]:
            process.kill()
        for url in (*self.stores, self._filters):
            forget(url)
        if self.audit:
            self.audit.close()

    def _wake_all(self) -> None:
        while self.zombies:
            self.wake(0)
            self.check()
        while self.stale:
            self.go_on(0)
            self.check()

    def deliver(self, output: Outgoing) -> Record:
        """Append a message to its topic."""
        record = self.cluster.produce(
            output.topic, output.key, output.value, headers=output.headers, partition=output.partition
        )
        name = payload_of(output.value)["id"]
        self.reached[output.topic].add(name)
        if output.application:
            self.redriven_at[record.topic_id, record.partition, record.offset] = output.application
        elif self.redriven_at:
            self._check_letters(output)
        if output.topic in self.spec.sources:
            self.watch.arrived(record, name, output.redriven)
        return record

    def _check_letters(self, output: Outgoing) -> None:
        """Check that no republisher passes on a dead letter of another one."""
        for hop in () if output.value.startswith(b"{") else decode(output.value).chain:
            name = hop.via.partition("/")[0]  # the names of branches follow
            owner = self.redriven_at.get((hop.topic_id, hop.partition, hop.offset), name)
            if owner != name and not hop.via.startswith("headwater."):
                raise Violation(f"{hop.via} passes on what {owner} gave up, as a record of {output.topic}")

    def letters_of(self, application: str) -> list[Record]:
        """Dead letters of a reader, in the order of their topic."""
        if application == FLOW:
            return self.letters
        if self.audit and application == AUDIT:
            return self.audit.letters
        [processor] = [one for one in self.spec.processors if one.name == application]
        return list(self.cluster.topics[processor.dead].records())

    def bring_back(self, letter: Record, *, mend: bool = True) -> None:
        """Redrive a dead letter.

        Args:
            letter: The dead letter.
            mend: Mend it for the reader that rejected it. An unproven dead letter is mended only if it was before.
        """
        facts = facts_of(letter)
        name, unproven = payload_of(letter.value)["id"], facts.reason is Reason.UNPROVEN
        if facts.application == FLOW:
            mend = mend and (not unproven or self.oracle.is_cured(name))
            if mend:
                self.oracle.cured(name)
                # A flow that lost its stores has no record of its earlier dead letters: it may have rejected another copy.
                self.again += [
                    one for one in self.letters if payload_of(one.value)["id"] == name and is_like(facts_of(one), facts)
                ]
        elif self.audit and facts.application == AUDIT:
            mend = mend and (not unproven or name in self.audit.fixed)
            if mend:
                self.audit.fixed.add(name)
        output = brought_back(letter, facts, mend=mend)
        for processor in self.spec.processors:
            if mend and processor.name == facts.application:
                self.oracle.revived(processor, payload_of(output.value))
        self.deliver(output)

    def is_listed_where_it_died(self, letter: Record) -> bool:
        """Whether the flow's ledger lists a dead letter by the coordinates of the rejection, and not by its event."""
        facts = facts_of(letter)
        assert self.driver is not None
        place = died_in(Node(facts.topic, facts.partition, facts.offset, facts.topic_id))
        listed = self.driver.runner.run.ledger.listed.values()
        return any(at[0] == facts.offset for groups in listed for at in groups.get(place, ()))

    def publish_dead_letter(self, letter: report.DeadLetter, flow: Flow[Any], generation: int = 1) -> Record:
        """Append a dead letter of a flow to its topic."""
        dead = record_of(letter, flow, generation)
        assert dead.value is not None
        return self.cluster.produce("dead", dead.key, dead.value, headers=dead.headers)

    def produce(self, topic: str, payload: Payload, *, again: bool = False) -> None:
        """Let a producer write an event, or write it again."""
        if not again:
            self.oracle.rooted(topic, payload)
        value = rooted(payload, raw=self.spec.is_raw(topic))
        partition = self.spec.partition_of_copy(payload) if again else None
        self.deliver(Outgoing(topic, self.spec.key_of(payload), value, partition=partition))

    def write(self, topic: str, count: int) -> None:
        """Let a producer write the next events of the world, and some of them again after them."""
        made = [event(self.spec, f"e{len(self.oracle.events) + number}") for number in range(count)]
        again = [one for one in made if self.spec.twice(topic, one)]
        for number, one in enumerate([*made, *again]):
            self.produce(topic, one, again=number >= count)

    def under(self, script: Script, work: Callable[[], object]) -> None:
        """Run a part of the engine or of a service with a script of faults."""
        before, self._faults.script = self._faults.script, script
        try:
            work()
        finally:
            self._faults.script = before

    def start(self, change: Change | None = None, *, accepts: Sequence[str] | None = None, **rebuild: Any) -> Driver:
        """Start an engine, which fences all others.

        Args:
            change: A change of its flow since the last start.
            accepts: Risks that its operator accepts; None for those that the world has.
            rebuild: What distinguishes that of a rebuild; see `Driver`.

        Raises:
            RunRefusedError: It does not start.
        """
        # The operator of these worlds accepts that a recreated topic is read, and that records were lost.
        accept = [*([Risk.TOPIC_RECREATED] * self.spec.recreates), *([Risk.BEYOND_END] * self.spec.cuts)]
        flow, last = changed(self.spec, change), self.spec.stages[-1].name
        urls = {name: self.urls.get(name, self.urls[last]) for name in flow.stage_names}
        checkpoint = None if rebuild else self._checkpoint
        driver = Driver(
            flow, self.cluster, urls, accept if accepts is None else accepts, checkpoint=checkpoint, **rebuild
        )
        if not rebuild:
            self._drivers.append((driver, 0, 0))
        return driver

    def engine(self, limit: int) -> None:
        """Fold one batch; any failure ends the engine.

        Raises:
            Violation: The engine refuses to start, or fails in a way that it must not.
        """
        live = self.live.ref
        try:
            driver, self.driver = self.driver or self.start(), None
            driver.batch(limit, self.slow)
            self.driver = driver
        except RunRefusedError as refused:
            if live != self.live.ref:
                return  # another generation was swapped in while it stood still
            raise Violation(f"the engine does not start: {refused}") from refused
        except StoreWentBack as alarm:
            raise Violation(f"nothing went back: {alarm}") from alarm
        except (Crash, StoreError):
            pass

    def zombie(self, limit: int, place: tuple[str, int]) -> None:
        """Begin a batch that is suspended before an effect."""
        self._begin(lambda: self.engine(limit), Script({place: End.PAUSE}), self.zombies)

    def wake(self, number: int) -> None:
        """Resume a suspended engine until it ends. Another one may have taken over meanwhile."""
        current = self.driver
        self._wake(number, self.zombies)
        # If it has not been replaced, it would be the active engine again; it dies instead.
        self.driver = current

    def serve(self, life: Callable[[], None]) -> None:
        """One life of a service. With faults it may die; the next life resumes at the committed offsets."""
        ends = self._faults.script.ends
        try:
            life()
        except (Crash, BrokerError, Transient):
            if not ends:
                raise

    def stand_still(self, life: Callable[[], None], script: Script) -> None:
        """Begin a service's life that is suspended where the script says."""
        self._begin(lambda: self.serve(life), script, self.stale)

    def go_on(self, number: int) -> None:
        """Resume a suspended service until it ends. Another one may have its partitions meanwhile."""
        self._wake(number, self.stale)

    def _begin(self, life: Callable[[], None], script: Script, among: list[tuple[Process, Script]]) -> None:
        def work(stand_still: Callable[[], None]) -> None:
            script.pause = stand_still
            life()

        def begin() -> None:
            process = Process(work)
            if process.ended:
                process.raise_error()
            else:
                among.append((process, script))

        self.under(script, begin)

    def _wake(self, number: int, among: list[tuple[Process, Script]]) -> None:
        if among:
            process, script = among.pop(number % len(among))
            self.under(script, process.wake)
            process.raise_error()

    def sweep(self) -> None:
        """Check the engines' outputs, and put dead letters into their topic."""
        for number, (driver, letters_seen, outputs_seen) in enumerate(self._drivers):
            letters, outputs = driver.runner.dead_letters, driver.runner.outputs
            for output in outputs[outputs_seen:]:
                item, standing = published(output.value)
                self.oracle.published(item, (standing.group, standing.position))
                if self.spec.audit == OUT:
                    self.deliver(Outgoing(OUT, output.key, output.value, output.headers))
            for letter in letters[letters_seen:]:
                self.live.take(letter, driver.runner)
            self._drivers[number] = (driver, len(letters), len(outputs))
        if not self.zombies:  # engines that have ended do nothing
            self._drivers = [one for one in self._drivers if one[0] is self.driver]

    def check(self) -> None:
        """Check the invariants."""
        self.sweep()
        if self.spec.rebuilds:
            self.live.follow()
        self.watch.check()
        for service in self.services:
            service.check(self.reached, self.redriven_at)

    def resolve(self) -> None:
        """Let everything in progress end, without faults.

        Raises:
            Violation: It does not end.
        """
        for _ in range(_ENDLESS):
            behind = [service for service in self.services if service.lag()]
            for service in behind:
                self.serve(service.drain)
            if not behind:
                self.slow = -1
                self.engine(1000)
                self.check()
                if self.audit and self.audit.lag:
                    self.audit.engine(1000)
                if self.driver is None or self.driver.lag or any(s.lag() for s in self.services):
                    continue
                if self.audit and self.audit.lag:
                    continue
                if not self.again and not (self.audit and self.audit.again):
                    return
                self.redrive_again()
        raise Violation("it does not come to an end")

    def redrive_again(self) -> None:
        """Redrive records that were rejected again, as an operator who knows that they were never folded there."""
        letters, self.again = self.again, []
        for letter in letters:
            if self.oracle.is_missing(payload_of(letter.value)["id"], facts_of(letter).stage, self.watch.held):
                self.bring_back(letter)
        if self.audit:
            letters, self.audit.again = self.audit.again, []
            for letter in letters:
                if self.audit.is_missing(payload_of(letter.value)["id"], facts_of(letter).stage):
                    self.bring_back(letter)

    def compare(self) -> None:
        """Compare every state with the plain fold, and the outputs with those of the plain fold.

        Raises:
            Violation: One differs.
        """
        assert self.driver is not None
        if self.audit:
            self.audit.compare(self.reached[self.spec.audit])
        for processor in self.spec.processors:
            letters = {payload_of(record.value)["id"] for record in self.cluster.topics[processor.dead].records()}
            self.oracle.compare_refused(processor, letters)
        self.oracle.compare_outputs()
        for number, stage in enumerate(self.spec.stages if self.spec.folds else ()):
            store = self.stores[self.urls[stage.name]]
            ref = self.driver.runner.run.ref.stage(stage.name)
            records = {key.decode(): decode_record(one.value, ref, key) for key, one in store.stage(ref).items()}
            found = {key: one.state for key, one in records.items() if one.histories.lanes or one.state not in _NOTHING}
            self.oracle.compare_states(number, found)
