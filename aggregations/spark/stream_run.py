"""One run of a flow whose batches Spark delivers: rows of a DataFrame, or ranges that the flow's tasks read from Kafka."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from aggregations.definition.flow import Flow
from aggregations.engine.clients import close_own, of_own, use_own
from aggregations.engine.engine import Engine
from aggregations.engine.opening import Opening
from aggregations.engine.options import RunOptions
from aggregations.engine.probe import holds_records
from aggregations.engine.ranges import Range, before, within
from aggregations.engine.retry import StoppedError
from aggregations.errors import FlowError, RunRefusedError, TasksLostError
from aggregations.report import Report
from aggregations.run.deliveries import Delivered, contradictions, gaps, missing, new
from aggregations.run.plan import grown
from aggregations.run.risks import refuse
from aggregations.run.turns import batch_to_repeat, unfinished_places
from aggregations.spark.action import Action, lost
from aggregations.spark.gather import gather, without_place
from envelope import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class StreamRun:
    """One run of a flow, whose batches a query of Spark's delivers.

    Args:
        flow: The flow.
        options: Its options, checked.
        opening: The run, begun.
        spark: The context.
        progress: Called after each commit with its report.
        stop: Set to end after the commit under way.
        begins_anywhere: Partitions that were never read begin where they are first delivered.

    Attributes:
        action: Executes batches.
        engine: Commits them.
    """

    def __init__(
        self,
        flow: Flow[Any],
        options: RunOptions,
        opening: Opening,
        spark: SparkContext,
        progress: Callable[[Report], None] | None,
        stop: threading.Event,
        begins_anywhere: bool,
    ) -> None:
        self._flow, self._options, self._opening, self._run = flow, options, opening, opening.run
        self._resources = ExitStack()
        self._resources.callback(opening.run.close)
        if options.kafka is not None and opening.topics is not None:
            own = of_own(options.kafka, opening.topics, {})
            use_own(own)
            self._resources.callback(close_own, own)
        self.action = Action(spark, flow)
        self._lows = {
            TopicPartition(plan.topic, one.partition): one.low for plan in opening.plans for one in plan.partitions
        }
        self._begins_anywhere, self._stop = begins_anywhere, stop
        self.engine = Engine(flow, opening, self.action, options, progress=progress, stop=stop)
        self._resources.callback(self.engine.close)

    def begin(self) -> None:
        """Complete what a crashed run left."""
        self.engine.begin()

    def close(self, *, clean: bool) -> None:
        """End the run; if it was clean, note it."""
        with self._resources:
            if clean:
                self.engine.finish()

    def fold(self, rows: "DataFrame") -> None:
        """Fold and commit what is new of some rows.

        Args:
            rows: The rows.

        Raises:
            RunRefusedError: Offsets are missing before them.
            StoppedError: The run was stopped before everything was committed.
            FlowError: Workers cannot import what they need.
        """
        flow = self._flow
        self.engine.batches.note_epochs()  # before the rows are read
        try:
            gathered = gather(rows, flow.name, self.action.routes, topics=flow.topics, headers=flow.reads_headers)
        except (Py4JError, PySparkException) as error:
            if isinstance(reason := lost(str(error)), FlowError):
                raise reason from error
            raise  # of the DataFrame's source, which its user knows
        try:
            # Only now: if a topic is still the driver's, the rows belong to it.
            self.engine.batches.check_topics({place: one.end for place, one in gathered.delivered.items()})
            self._check(gathered.delivered)
            self.action.gathered = gathered
            self._commit(gathered.delivered)
        finally:
            self.action.gathered = None
            gathered.release()

    def fold_ranges(self, ends: Mapping[TopicPartition, int]) -> None:
        """Fold and commit what tasks read from Kafka, from where the flow stands up to these ends.

        A batch that was begun is finished, though Spark may end this one before it.
        """
        begun = unfinished_places(self._run)
        ends = {**ends, **{place: max(end, ends.get(place, 0)) for place, end in begun.items()}}
        self.engine.commit_all(partial(self.engine.left, ends))

    def fold_archive(self, rows: "DataFrame") -> Report:
        """Fold and commit an archive in parts; see `Aggregator.fold`."""
        from pyspark.sql import functions as f

        nowhere = f.isnull("topic") | f.isnull("partition") | f.isnull("offset")
        nowhere |= (f.col("partition") < 0) | (f.col("offset") < 0)
        found = rows.groupBy("topic", "partition").agg(
            f.min("offset").alias("first"), f.max("offset").alias("last"), f.count_if(nowhere).alias("nowhere")
        )
        ends = {}
        for row in found.collect():
            if row.nowhere:
                raise without_place(self._flow.name)
            ends[TopicPartition(row.topic, row.partition)] = row.first, row.last + 1
        done = dict.fromkeys(ends, 0)
        while part := self._part(ends, done):
            places = [(f.col("topic") == one.topic) & (f.col("partition") == one.partition) for one in part]
            spans = [(f.col("offset") >= one.start) & (f.col("offset") < one.end) for one in part]
            self.fold(rows.filter(reduce(or_, map(and_, places, spans))))
            for place, one in zip(places, part, strict=True):
                done[one.place] = one.end
                if self._run.start.get(one.place, 0) < one.end < ends[one.place][1]:  # a hole: where does it end?
                    behind = rows.filter(place & (f.col("offset") >= one.end)).agg(f.min("offset"))
                    done[one.place] = max(one.end, *behind.collect()[0])
        if left := [place for place, (_, end) in ends.items() if self._run.start.get(place, 0) < end]:
            raise TasksLostError(f"Spark delivered less of {left[0].topic}:{left[0].partition} than it had counted")
        return self.engine.total

    def _part(self, ends: Mapping[TopicPartition, tuple[int, int]], done: Mapping[TopicPartition, int]) -> list[Range]:
        """The next part of an archive: at most so many offsets, those of the archive's partitions in proportion.

        What a crashed run may have passed on comes first, and at once.
        """
        start = self._run.start
        left = [
            Range(place.partition, begin, end, place.topic)
            for place, (first, end) in sorted(ends.items())
            if (begin := max(first, done[place], start.get(place, 0))) < end
        ]
        return before(left, batch_to_repeat(self._run)) or within(left, self._options.max_records)

    def _check(self, delivered: Mapping[TopicPartition, Delivered]) -> None:
        """Refuse a batch in which something is missing; decide where partitions begin, and note it before anything is folded.

        A run after a crash must neither begin elsewhere, nor take what an accepted gap left out for delivered.
        """
        run, name = self._run, self._flow.name
        if texts := contradictions(delivered.values(), run.start):
            raise RunRefusedError(
                f"flow {name}: {'; '.join(texts)}. They are of two topics of that name, or of two clusters: filter one of them "
                "out"
            )
        positions, begun = run.start, {}
        for place, one in delivered.items():
            if self._is_unread(place):
                # The flow begins where the log does, or where what is delivered before that begins.
                low = one.first if self._begins_anywhere else self._lows.get(place, 0)
                positions[place] = begun[place] = low if low <= one.first else 0
        absent = missing(delivered.values(), positions)
        refuse(found := gaps(name, absent, self._known), self._options.accept)
        if found:
            begun |= {
                place: delivered[place].first
                for place, spans in absent.items()
                if spans[0][0] == positions.get(place, 0)
            }
        for place, start in begun.items():
            run.begin_at(place, start)
        if begun:
            run.note(run.changed())

    def _is_unread(self, place: TopicPartition) -> bool:
        """Whether nobody has read a partition; one that was added to a topic which is read begins at offset 0."""
        run = self._run
        given = run.manifest.starting_offsets.get(place.topic, {}) if run.manifest else {}
        if run.start.get(place) or place.partition in given:
            return False
        return self._opening.topics is None or place in run.start or not run.positions(place.topic)

    def _known(self, place: TopicPartition, spans: Sequence[tuple[int, int]]) -> str:
        """What is known of the records in some spans of offsets; empty if there are none."""
        settings, topics = self._options.kafka, self._opening.topics
        if settings is None or topics is None:
            return "whether there are records cannot be known without the broker"
        has = holds_records(settings, topics, place, spans, self._stop.is_set)
        return {None: "the topic does not have these offsets", True: "the topic has records there", False: ""}[has]

    def _commit(self, delivered: Mapping[TopicPartition, Delivered]) -> None:
        run = self._run
        if absent := {place: end for place, end in batch_to_repeat(run).items() if _end(delivered, place) < end}:
            named = ", ".join(f"{place.topic}:{place.partition} up to {end}" for place, end in absent.items())
            raise RunRefusedError(
                f"flow {self._flow.name}: a crashed run may have passed on records of {named}. Deliver all of them in one batch: "
                "in another batch, a filter over all partitions would pass on other records"
            )
        held = set()
        if self._options.keeps_order(self._flow):  # what added partitions hold comes after all that the others hold
            held = {one for one in delivered if one not in run.start and run.positions(one.topic)}
        self.engine.commit_all(partial(self._left, {place: delivered[place] for place in delivered.keys() - held}))
        for topic in sorted({place.topic for place in held}):
            if not self.engine.widen(topic) and (growth := run.growths.get(topic)) is not None:
                refuse([grown(self._flow.name, topic, growth)], self._options.accept)
        if held:
            self.engine.commit_all(partial(self._left, {place: delivered[place] for place in held}))
        if self._left(delivered):
            raise StoppedError

    def _left(self, delivered: Mapping[TopicPartition, Delivered]) -> list[Range]:
        """What of a batch is not committed."""
        left = new(delivered, self._run.start)
        return [Range(place.partition, start, end, place.topic) for place, (start, end) in left.items()]


def _end(delivered: Mapping[TopicPartition, Delivered], place: TopicPartition) -> int:
    return delivered[place].end if place in delivered else 0
