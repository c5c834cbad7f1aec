"""The copy process: read, produce, save the position, commit."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from jobs.copying.counts import CopyStatistics, OnCopied
from jobs.copying.positions import POSITIONS, Positions, encoded
from jobs.copying.source import CopySource, Read, Task, changed
from jobs.environment import UsageError
from persistence.commit.faults import COPY_COMMIT, COPY_POSITION, COPY_PRODUCE, effect
from persistence.garbage import no_collection
from persistence.kafka import KafkaSettings, Topics
from persistence.kafka.producer import batch_bytes
from persistence.kafka.transactions import TransactionalProducer

_CHECK_SECONDS: Final = 5.0  # between two checks of a source that has nothing new
_START_SECONDS: Final = 10.0  # to wait for a broker at the start
_OVERHEAD_BYTES: Final = 256  # of a record batch around one record, with room to spare


class Copy:
    """Copies a source to a topic, so that each record is in the topic exactly once, whatever crashes.

    The position in the source is saved in the transaction of the messages that it covers. The order of work is:

    1. begin as `transactional.id` NAME: an earlier process of this name is fenced, and its transaction ended,
    2. read the position that was committed last,
    3. read records from there,
    4. produce the messages,
    5. check that the source is still the same,
    6. produce the position,
    7. commit the transaction, and continue with step 3.

    Readers of the target need `isolation.level=read_committed`. Flows and republishers have it.

    Args:
        name: Name of the copy: its `transactional.id`, the hop's `via` and the producer's name. Do not change it.
        source: `TopicRecords`, `FileLines`, `QueryRows`, or a source of your own.
        target: Topic to write.
        settings: Settings of the target's cluster.
        positions: Compacted topic of that cluster, in which copies save their positions.
        dead_letter: Topic of that cluster for records that cannot be copied. Without one such a record stops the copy.
        batch_size: Maximum number of records in a transaction.
        pause: Seconds to wait when a file or a query has nothing new.

    Attributes:
        statistics: Counts of the current or last run.

    Raises:
        UsageError: A name or target is missing, or the target is also read.
    """

    def __init__(
        self,
        name: str,
        source: CopySource,
        target: str,
        settings: KafkaSettings,
        *,
        positions: str = POSITIONS,
        dead_letter: str | None = None,
        batch_size: int = 10_000,
        pause: float = 0.1,
    ) -> None:
        if not name.strip() or not target:
            raise UsageError("a copy needs a name and a target topic")
        if len({target, positions, dead_letter}) < 3:
            raise UsageError("the target, the dead-letter topic and the topic of positions must differ")
        if source.reads(target):
            raise UsageError(f"{target} is read and written: messages would loop forever; write to another topic")
        self.statistics = CopyStatistics()
        self._name = name
        self._source = source
        self._target = target
        self._settings = settings
        self._positions = Positions(settings, positions)
        self._dead_letter = dead_letter
        self._batch_size = batch_size
        self._pause = pause
        self._stop = threading.Event()

    def stop(self) -> None:
        """Make `run` commit the records in flight and return, permanently. Safe in any thread or signal handler."""
        self._stop.set()

    def run(self, *, until_caught_up: bool = False, progress: OnCopied | None = None) -> CopyStatistics:
        """Copy until `stop` is called.

        Args:
            until_caught_up: Stop when everything that is in the source now has been copied.
            progress: Called after each commit.

        Raises:
            ProducerFenced: A newer process copies under this name.
            BrokerError: Kafka cannot be reached or refuses a request. Nothing of the open transaction becomes visible,
                and the next run continues after the last committed one.
            Unsafe: The source or the target is not the one of earlier runs.
        """
        self.statistics = CopyStatistics()
        topics = Topics(self._settings, timeout=_START_SECONDS)
        topics.check()
        outputs = [self._target, *([self._dead_letter] if self._dead_letter else [])]
        topics.check_rights(write=outputs)
        sizes, facts = topics.max_message_bytes(outputs), topics.describe(outputs)
        self._positions.check()
        with TransactionalProducer(
            self._settings,
            self._name,
            message_max_bytes=max(sizes.values()),
            batch_size=batch_bytes(sizes.values()),
        ) as producer:
            saved = self._positions.read(self._name)
            run = _Run(self, producer, facts[self._target].topic_id, saved, until_caught_up)
            task = Task(
                self._name,
                self._target,
                sizes[self._target] - _OVERHEAD_BYTES,
                sizes[self._dead_letter] if self._dead_letter else None,
                run.epoch,
                until_caught_up,
                self._settings,
            )
            try:
                self._source.open(task, saved["position"] if saved else None)
                run.loop(progress)
            finally:
                self._source.close()
        return self.statistics


class _Run:
    """One run of a copy, after earlier ones are fenced.

    Attributes:
        epoch: Number of the run: higher than that of every earlier run that has committed.
    """

    def __init__(
        self,
        of: Copy,
        producer: TransactionalProducer,
        target_id: str,
        saved: dict[str, Any] | None,
        until_caught_up: bool,
    ) -> None:
        self._of = of
        self._until_caught_up = until_caught_up
        self._producer = producer
        self._target_id = target_id
        self._place = of._positions.place(of._name)
        self.epoch = 0
        if saved is not None:
            self.epoch = saved["epoch"] + 1
            if (saved["target"], saved["target_id"]) != (of._target, target_id):
                same = saved["target"] == of._target
                raise changed(
                    f"copy {of._name}: topic {of._target} was created again since it was written"
                    if same
                    else f"copy {of._name} has written {saved['target']}, not {of._target}"
                )
            if saved["kind"] != of._source.kind:
                raise changed(f"copy {of._name} has read {saved['kind']}, not {of._source.kind}")
        of.statistics.epoch, of.statistics.sequence = self.epoch, saved["sequence"] if saved else None

    def loop(self, progress: OnCopied | None) -> None:
        """Copy until the end; the transaction in flight is committed before a stop."""
        of, source = self._of, self._of._source
        checked = time.monotonic()
        while not of._stop.is_set():
            began = time.monotonic()
            with no_collection():
                read = source.read(of._batch_size)
                if read.counts.read:
                    self._commit(read)
            if read.counts.read:
                checked = time.monotonic()
                if progress:
                    progress(of.statistics)
                continue
            if self._until_caught_up and source.caught_up:
                return
            if time.monotonic() - checked > _CHECK_SECONDS:
                source.check()
                checked = time.monotonic()
            if time.monotonic() - began < of._pause:  # a source that waits itself needs no pause
                of._stop.wait(of._pause)

    def _commit(self, read: Read) -> None:
        """Steps 4 to 7."""
        of = self._of
        effect(COPY_PRODUCE, lambda: self._produce(read))
        of._source.check()
        effect(COPY_POSITION, self._save)
        effect(COPY_COMMIT, self._producer.flush)
        of.statistics.add(read.counts)
        if of._source.sequence is not None:
            of.statistics.sequence = of._source.sequence

    def _produce(self, read: Read) -> None:
        of = self._of
        send: Callable[..., None] = self._producer.send
        for one in read.outputs:
            send(of._dead_letter if one.dead else of._target, one.value, one.key, one.headers)

    def _save(self) -> None:
        of = self._of
        key, partition = self._place
        sequence = of._source.sequence
        value = {
            "copy": of._name,
            "target": of._target,
            "target_id": self._target_id,
            "kind": of._source.kind,
            "position": of._source.position,
            "sequence": of.statistics.sequence if sequence is None else sequence,
            "epoch": self.epoch,
        }
        self._producer.send(of._positions.topic, encoded(value), key, partition=partition)
