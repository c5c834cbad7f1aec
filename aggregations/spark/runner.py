"""Runs a flow on Spark: as a query of Spark's whose source is `headwater`, and whose batches an aggregator folds."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from aggregations.definition.flow import Flow
from aggregations.engine.options import RunOptions
from aggregations.engine.retry import StoppedError
from aggregations.errors import RunRefusedError, SparkEndedError, TasksLostError
from aggregations.report import Report
from aggregations.run.plan import Plan
from aggregations.spark.action import lost, reason_of
from aggregations.spark.aggregator import Aggregator
from aggregations.spark.checks import check_given
from aggregations.spark.jvm import jvm_ahead
from aggregations.spark.session import master_of, session, submitted

_LOOK_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 5.0
"""Seconds that a stop waits for the batch under way before it cancels the batch."""
_CLOCK_SECONDS: Final = 1.0
"""How far the clock has to be set back to count."""
_SLOW: Final = "failed to connect back"
_STARTS: Final = 5
"""How often a query is started whose source does not start in time."""
_OF_CHECKPOINT: Final = re.compile("log file|StreamMetadata|CONCURRENT_STREAM_LOG_UPDATE")
_LOG = logging.getLogger("headwater.spark")
_starting: Final = threading.Lock()
"""No two queries of a session have one name."""


def run_flow(
    flow: Flow[Any],
    options: RunOptions | None = None,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    modules: Sequence[Path] = (),
    progress: Callable[[Report], None] | None = None,
    planned: Callable[[Plan], None] | None = None,
    stop: threading.Event | None = None,
    checkpoint: str | None = None,
    **fields: Any,
) -> Report:
    """Run a flow on Spark until it is stopped, or until it has caught up with the ends of the topic at its start.

    Args:
        flow: The flow.
        options: Its options.
        master: Spark's master; None for the master of spark-submit, else `local[2]`.
        conf: Spark settings. They override the engine's; settings given to spark-submit override both.
        modules: Python files that workers on other machines import by name.
        progress: Called after each batch with its report.
        planned: Called once for each source with its plan: where each partition starts.
        stop: Set it to end the run after the current batch, or while it waits for a server before its first batch. A
            batch that takes longer than 5 more seconds, or waits for a retry, is left to the next run.
        checkpoint: Directory of Spark's checkpoint; None for a temporary one. Progress is in the stores: whatever
            happens to the checkpoint, no record is lost or folded twice.
        fields: Fields of `RunOptions`, instead of `options`.

    Returns:
        The counts of all batches.

    Raises:
        BrokerError: Kafka does not answer, at the start for a minute, or refuses a request.
        StoreError: A store does not answer, at the start for a minute, or refuses a request; `Fenced` when a newer run
            has taken over.
        RunRefusedError: It would be unsafe to continue.
        FlowError: The flow or its options cannot work on Spark.
        TasksLostError: Spark lost tasks repeatedly, or Spark itself ended.
    """
    settings = {**(conf or {}), **submitted()}
    bound = check_given(flow, RunOptions.given("run_flow", options, fields), master_of(master, settings), conf=settings)
    _ = bound.broker
    stop = stop or threading.Event()
    aggregator = Aggregator(flow, bound, progress=progress, planned=planned, stop=stop)
    with jvm_ahead(master, conf or {}), aggregator:
        try:
            aggregator.open(reads=True)
            with session(f"headwater {flow.name}", modules=modules, master=master, conf=conf, stop=stop) as spark:
                return _stream(aggregator, SparkSession(spark), checkpoint, stop)
        except StoppedError:  # while a server did not answer, or Spark started
            return aggregator.total


def _stream(aggregator: Aggregator, spark: SparkSession, checkpoint: str | None, stop: threading.Event) -> Report:
    """Run queries until the flow is stopped, or has caught up."""
    with _checkpoint(spark, checkpoint) as given, _checkpoint(spark, None) as another:
        directory, starts = given, 1
        while True:
            try:
                with _explained(aggregator, stop):
                    if _was_set_back(_started(aggregator, spark, directory), aggregator, stop):
                        _LOG.warning(
                            "the clock was set back: the query is started again, or its trigger would wait as long"
                        )
                        continue
            except TasksLostError as error:
                # Spark gives the process of a source ten seconds to start, whatever else the machine does.
                if _SLOW not in str(error) or starts == _STARTS:
                    raise
                _LOG.warning("start %d of the query: %s", starts, error)
                starts += 1
                continue
            if stop.is_set() or not (aggregator.is_behind or aggregator.widened()):
                return aggregator.total
            directory = another if aggregator.is_behind else directory


def _started(aggregator: Aggregator, spark: SparkSession, checkpoint: str) -> StreamingQuery:
    """Start a query, with the name of the flow unless another one has it."""
    ranges = aggregator.read_stream(spark)
    writer = ranges.writeStream.foreachBatch(aggregator).option("checkpointLocation", checkpoint)
    with _starting:
        if aggregator.flow.name not in {one.name for one in spark.streams.active}:
            writer = writer.queryName(aggregator.flow.name)
        return writer.trigger(**_trigger(aggregator.options)).start()


def _trigger(options: RunOptions) -> dict[str, Any]:
    """Spark's trigger."""
    if options.until_caught_up:
        return {"availableNow": True}
    return {"processingTime": f"{max(round(options.trigger_seconds * 1000), 1)} milliseconds"}


@contextmanager
def _checkpoint(spark: SparkSession, given: str | None) -> Iterator[str]:
    """The directory of Spark's checkpoint; without one, a temporary one: nothing depends on it.

    The JVM removes it if this process is killed.
    """
    if given is not None:
        yield given
        return
    within = spark.sparkContext._temp_dir
    with TemporaryDirectory(prefix="checkpoint-", dir=within, ignore_cleanup_errors=True) as directory:
        yield Path(directory).as_uri()


def _was_set_back(query: StreamingQuery, aggregator: Aggregator, stop: threading.Event) -> bool:
    """Wait for the end of a query, or stop it.

    When the run is stopped, its batch gets a few seconds to end. Spark's trigger waits until the clock shows a time, so
    a query whose machine's clock is set back is stopped between two batches.

    Returns:
        Whether it was stopped because the clock was set back.
    """
    ahead = time.time() - time.monotonic()
    while not query.awaitTermination(_LOOK_SECONDS):  # type: ignore[arg-type]
        if stop.is_set():
            aggregator.end(_STOP_SECONDS)
            query.stop()
            return False
        if ahead - (time.time() - time.monotonic()) > _CLOCK_SECONDS:
            with aggregator.between_batches():
                query.stop()
            return True
    return False


@contextmanager
def _explained(aggregator: Aggregator, stop: threading.Event) -> Iterator[None]:
    """Raise what ended a query, rather than what Spark says of it; nothing if the run was stopped.

    Raises:
        Exception: What ended the aggregator.
        RunRefusedError: Spark cannot use its checkpoint.
        TasksLostError: Anything else that ended the query.
        SparkEndedError: Spark's JVM or its context ended.
    """
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        cause = aggregator.error
        if isinstance(cause, StoppedError) or (stop.is_set() and isinstance(cause, SparkEndedError | None)):
            return  # the signal that stopped the run may have ended the JVM as well
        if cause is not None:
            raise cause from None
        if isinstance(error, PySparkException | Py4JJavaError):
            whole = str(error)
            text = whole.partition("terminated with exception: ")[2] or whole
            if isinstance(error, Py4JJavaError):
                text = str(error.java_exception.toString())
            if _OF_CHECKPOINT.search(whole):
                raise RunRefusedError(
                    f"Spark cannot use its checkpoint ({reason_of(text)}). If another query uses it, end that; else name an empty "
                    "directory, or remove it: progress is in the stores"
                ) from None
            raise lost(text) from None
        raise SparkEndedError("Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)") from None
