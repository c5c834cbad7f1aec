"""A flow as the function of `DataStreamWriter.foreachBatch`, in a Spark session of the user's own."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from pyspark import SparkContext

from aggregations.definition.flow import Flow
from aggregations.engine.engine import Engine, finish
from aggregations.engine.opening import Opening, open_run
from aggregations.engine.options import RunOptions, outputs_of
from aggregations.errors import FlowError
from aggregations.report import Report
from aggregations.run.deliveries import DELIVERED
from aggregations.run.plan import Plan
from aggregations.run.start import EARLIEST
from aggregations.spark.checks import check_given
from aggregations.spark.gather import check_rows
from aggregations.spark.stream_run import StreamRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from aggregations.spark.planning import KafkaPlan
    from aggregations.spark.source import PlanServer

_LOG = logging.getLogger("headwater.spark")
_QUERY: Final = "sql.streaming.queryId"
"""Local property of the thread that runs a query."""
COLUMNS: Final = ("topic", "partition", "first", "last")
"""Columns of the source `headwater`; see `aggregations.spark.source.OffsetRange`."""


class Aggregator:
    """Folds the batches of a stream into the states of a flow: the function that `foreachBatch` takes.

        rows = spark.readStream.format("kafka").option("subscribe", "flights.legs").load()
        rows.writeStream.foreachBatch(flow.aggregator(stores="redis://host")).option("checkpointLocation", path).start()

    The batches are those of Spark's Kafka source, or of any other source with its columns: `key` and `value` (binary),
    `topic` (string), `partition` (int), `offset` (bigint), `timestamp` (timestamp), and `headers` if the flow reads them.
    Rows may come in any order, and more than once.

    Progress is what the flow's stores say, never Spark's checkpoint: records that are in are left out, and a batch that
    begins after the flow's position is refused as a `gap`. So the checkpoint may be lost, older or newer.

    An aggregator serves one query at a time. The run begins with its first batch, and fences every older run of the
    flow. After an error the next batch begins another run.

    Args:
        flow: The flow.
        options: Options of the run. With rows, `until_caught_up` and `trigger_seconds` are the query's own matters, and
            `start` is `earliest`, or `delivered`: partitions that were never read begin at their first delivered record.
            Without `kafka` the flow cannot publish, has no dead-letter topic, and does not notice added partitions.
        progress: Called after each commit with its report.
        planned: Called when the run begins, with the plan of each source; never without `kafka`.
        stop: Set it to end after the commit under way. A batch of rows that is not whole then fails, and its stream
            delivers it again.

    Raises:
        FlowError: The flow or the options cannot work.

    Attributes:
        error: What ended its last batch; None while nothing has failed.
    """

    def __init__(
        self,
        flow: Flow[Any],
        options: RunOptions,
        *,
        progress: Callable[[Report], None] | None = None,
        planned: Callable[[Plan], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.flow = flow
        self._anywhere = options.start == DELIVERED
        self.options = (replace(options, start=EARLIEST) if self._anywhere else options).checked(flow)
        written = [*outputs_of(flow), *filter(None, (options.dead_letters, options.journal))]
        if options.kafka is None and written:
            raise FlowError(f"flow {flow.name}: it writes to {written[0]}; give kafka=, the settings of its broker")
        self._progress, self._planned = progress, planned
        self._stop = stop or threading.Event()
        self._reads = False  # Kafka itself
        self._closed = False
        self._total = Report()
        self._lock = threading.Lock()
        self._folding: int | None = None
        """The thread that folds a batch."""
        self._context = Context()
        self._opening: Opening | None = None
        self._run: StreamRun | None = None
        self._query: str | None = None
        self._spark: SparkContext | None = None
        self._plan: KafkaPlan | None = None
        self._server: PlanServer | None = None
        self.error: BaseException | None = None

    def __call__(self, batch: "DataFrame", batch_id: int) -> None:
        """Fold a micro-batch and commit it.

        Args:
            batch: Its rows.
            batch_id: Spark's number of it, which means nothing here.

        Raises:
            RunRefusedError: It would be unsafe to fold it; nothing of it is written.
            Exception: It could not be folded or committed. Whatever was raised, the query ends.
        """
        if self._plan is None or batch.columns != [*COLUMNS]:
            try:
                self._check(batch)
            except FlowError as error:
                self.error = error
                raise
            with self._turn(batch) as run:
                self._context.run(run.fold, batch)
            return
        with self._turn(batch) as run:
            began, before = time.monotonic(), run.engine.total.batches
            records = run.engine.total.records
            self._context.run(run.fold_ranges, self._plan.ends)
            self._plan.committed(run.engine.total.batches - before, time.monotonic() - began)
            _show_records(batch.sparkSession, self._query, run.engine.total.records - records)

    def fold(self, rows: "DataFrame") -> Report:
        """Fold an archive: all rows of a DataFrame that is no stream, such as a copy of a topic in Parquet.

        It is read in parts of at most `max_records` offsets, in the order of offsets, and checked for missing ones.

        Args:
            rows: The DataFrame, with the columns of Spark's Kafka source.

        Returns:
            The counts of all commits of the run.

        Raises:
            RunRefusedError: It would be unsafe, for example because offsets are missing; what was committed before stays.
        """
        if rows.isStreaming:
            raise FlowError(
                f"flow {self.flow.name}: fold() takes a DataFrame that is no stream; give the aggregator to the stream: "
                "rows.writeStream.foreachBatch(aggregator)"
            )
        self._check(rows)
        with self._turn(rows) as run:
            return self._context.run(run.fold_archive, rows)

    def read_stream(self, spark: "SparkSession") -> "DataFrame":
        """A stream of the ranges that the flow has to read: `format("headwater")`. Its tasks read Kafka themselves.

        The run begins with this call, and the stream is only for this aggregator.

        Args:
            spark: The session.

        Returns:
            A streaming DataFrame of `topic` (string), `partition` (int), `first` (bigint), `last` (bigint).

        Raises:
            FlowError: The options have no `kafka`.
            RunRefusedError: It would be unsafe to begin.
        """
        from aggregations.spark.planning import KafkaPlan
        from aggregations.spark.source import ADDRESS, NAME, PlanServer, RangeSource

        if self.options.kafka is None:
            raise FlowError(
                f"flow {self.flow.name}: read_stream() reads Kafka itself; give kafka=, the settings of its broker"
            )
        if _running(spark, self._query) is not None:
            raise FlowError(f"flow {self.flow.name}: a query of this aggregator runs; stop it before read_stream()")
        if not self._reads:  # a run that began for rows has other checks behind it
            self._abandon(clean=self.error is None)
        self._spark, self._reads = spark.sparkContext, True
        self._opened(self._spark)
        self._plan = KafkaPlan(self._engine, self.options)
        if self._server is not None:
            self._server.close()
        self._server = PlanServer(self._plan, self._failed)
        if not _has_source(spark):  # `jobs.StatesSource` is one, too
            spark.dataSource.register(RangeSource)
        return spark.readStream.format(NAME).option(ADDRESS, self._server.address).load()

    def open(self, *, reads: bool) -> None:
        """Begin the run, which needs no Spark yet.

        Args:
            reads: `read_stream` follows.

        Raises:
            RunRefusedError: It would be unsafe to begin.
            StoppedError: `stop` was set while a server did not answer.
        """
        self._reads = reads
        self._opening = open_run(self.flow, self.options, planned=self._planned, reads=reads, stop=self._stop)

    def end(self, seconds: float) -> None:
        """After `stop` was set, wait for the batch under way, and cancel it after this time."""
        while not self._lock.acquire(timeout=seconds):
            if (run := self._run) is not None:
                run.engine.cancel()
        self._lock.release()

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Run the block when no batch is folded; one that begins meanwhile fails."""
        with self._lock:
            yield

    def widened(self) -> bool:
        """Begin to read partitions that waited for others; return whether there are any."""
        return self._run is not None and self._context.run(self._run.engine.widened)

    @property
    def is_behind(self) -> bool:
        """Whether the query of `read_stream` has ended before it read all that it had to."""
        return self._plan is not None and self._plan.is_behind

    @property
    def total(self) -> Report:
        """The counts of the current run, or of the last one."""
        return self._run.engine.total if self._run is not None else self._total

    def close(self) -> None:
        """End the run cleanly; stop the query first. Without it, the next run takes this one for crashed, which costs only time."""
        if self._folding == threading.get_ident():
            raise FlowError(f"flow {self.flow.name}: close() was called within a batch; stop the query, then close")
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None
            self._abandon(clean=self.error is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, rows: "DataFrame") -> None:
        if self.options.history is not None:
            raise FlowError(
                f"flow {self.flow.name}: history= is for ranges of Kafka; fold an archive with Aggregator.fold"
            )
        if self.options.until_caught_up:
            raise FlowError(
                f"flow {self.flow.name}: until_caught_up= is for ranges of Kafka; start the query with trigger(availableNow=True)"
            )
        if self._plan is not None:
            raise FlowError(
                f"flow {self.flow.name}: this aggregator reads Kafka itself (read_stream()); fold rows with another one"
            )
        if self.options.start != EARLIEST:
            raise FlowError(
                f"flow {self.flow.name}: start= of a stream of rows is {EARLIEST!r} or {DELIVERED!r}; where it begins, its source "
                "decides (startingOffsets)"
            )
        check_rows(rows, self.flow.name, headers=self.flow.reads_headers)

    def __reduce__(self) -> NoReturn:
        raise FlowError(
            f"flow {self.flow.name}: an aggregator cannot be sent to another process, as Spark Connect does; use a classic Spark "
            "session (spark-submit, SPARK_REMOTE unset)"
        )

    @contextmanager
    def _turn(self, rows: "DataFrame") -> Iterator[StreamRun]:
        """The run, for one batch at a time."""
        if self._closed:
            raise FlowError(
                f"flow {self.flow.name}: this aggregator is closed; make another one with flow.aggregator()"
            )
        spark = rows.sparkSession
        query = _query_of(rows)
        other = self._query
        if other != query and _running(spark, other) is not None:
            raise FlowError(
                f"flow {self.flow.name}: this aggregator serves the query {other}; make another one with flow.aggregator() for "
                f"query {query}. Two queries of one flow fence each other: each needs a flow with a name of its own"
            )
        if not self._lock.acquire(blocking=False):
            raise FlowError(f"flow {self.flow.name}: this aggregator is folding another batch")
        self._folding = threading.get_ident()
        try:
            self._query = query
            self.error = None
            yield self._opened(spark.sparkContext)
        except BaseException as error:
            self.error = error
            self._abandon(clean=False)
            if isinstance(error, Exception):
                raise
            # PySpark passes exceptions only to the query, which would otherwise stay active for ever.
            raise RuntimeError(f"flow {self.flow.name}: {type(error).__name__} in a batch") from error
        finally:
            self._folding = None
            self._lock.release()

    def _engine(self) -> Engine:
        """The engine of the current run, for the thread that plans: Spark plans before a batch and after it."""
        assert self._spark is not None
        return self._opened(self._spark).engine

    def _failed(self, error: Exception) -> None:
        """Note what planning failed with; the query ends."""
        self.error = error
        self._abandon(clean=False)

    def _opened(self, spark: SparkContext) -> StreamRun:
        if self._closed:
            raise FlowError(
                f"flow {self.flow.name}: this aggregator is closed; make another one with flow.aggregator()"
            )
        if self._run is not None and self._run.action.spark is not spark:
            self._abandon(clean=False)
        if self._run is None:
            if self._opening is None:
                check_given(self.flow, self.options, str(spark.master))
                if spark.getConf().get("spark.speculation", "false").lower() == "true":
                    raise FlowError(
                        "spark.speculation=true: two attempts of a task would write the same states; set it to false"
                    )
                self._context.run(partial(self.open, reads=self._reads))
            assert self._opening is not None
            opening, self._opening = self._opening, None
            given = self.flow, self.options, opening, spark, self._progress, self._stop, self._anywhere
            try:
                self._run = self._context.run(StreamRun, *given)
            except BaseException:
                opening.run.close()
                raise
            self._context.run(self._run.begin)
        return self._run

    def _abandon(self, *, clean: bool) -> None:
        """End the run, if there is one."""
        if self._run is not None:
            run, self._run = self._run, None
            self._total = run.engine.total
            self._context.run(run.close, clean=clean)
        if self._opening is not None:  # Spark has not started
            opening, self._opening = self._opening, None
            if clean:
                finish(opening.run)
            opening.run.close()


def _query_of(batch: "DataFrame") -> str | None:
    """Id of the query that this thread runs; None outside of a query."""
    found: str | None = batch.sparkSession.sparkContext.getLocalProperty(_QUERY)
    return found


def _has_source(spark: "SparkSession") -> bool:
    """Whether a source `headwater` is registered."""
    try:
        session: Any = spark._jsparkSession
        return bool(session.sessionState().dataSourceManager().dataSourceExists("headwater"))
    except Exception as error:  # what it calls is Spark's own
        _LOG.debug("registered sources are not known: %s", error)
        return False


def _running(spark: "SparkSession", query: str | None) -> Any:
    """Spark's own object of a query that is active in any session of this program; None if there is none.

    The session of a batch is a copy, whose `streams` do not know the query.
    """
    if query is None:
        return None
    try:
        jvm: Any = spark.sparkContext._jvm
        queries = spark._jsparkSession.sharedState().activeStreamingQueries()
        return queries.get(jvm.java.util.UUID.fromString(query))
    except Exception as error:  # what it calls is Spark's own
        _LOG.debug("query %s is not found: %s", query, error)
        return None


def _show_records(spark: "SparkSession", query: str | None, records: int) -> None:
    """Show how many records a micro-batch had as the number of its input rows: in Spark's progress, listener and pages.

    Spark counts the rows of the source, which are ranges. A Spark that does not let this be corrected shows none.
    """
    if not records or (stream := _running(spark, query)) is None:
        return
    try:
        leaves = stream.lastExecution().executedPlan().collectLeaves()
        for number in range(leaves.size()):
            rows = leaves.apply(number).metrics().get("numOutputRows")
            if rows.isDefined():
                rows.get().set(records)
                return
    except Exception as error:  # what it calls is Spark's own
        _LOG.debug("the number of records is not shown: %s", error)
