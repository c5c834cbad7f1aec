"""`format("headwater")` of a stream: a source whose rows are ranges of Kafka's offsets, which the flow's tasks read themselves.

The source runs in a Python process that Spark's JVM starts. It asks the driver, over a Unix socket, where the flow stands
and what there is to read. Its offsets are Kafka's, by topic and partition, as Spark's own Kafka source writes them.
"""

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final, NamedTuple, Protocol

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from aggregations.spark.sockets import socket_directory

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:
    IS_LIMITED = False
    """Whether Spark asks a source that is written in Python for less than everything: from 4.2 on."""
else:
    IS_LIMITED = True

NAME: Final = "headwater"
ADDRESS: Final = "address"
"""Option with the path of the driver's socket."""

Offsets = dict[str, dict[str, int]]
"""Next offset by topic and partition, as JSON has them."""


class OffsetRange(NamedTuple):
    """A row of the source.

    Attributes:
        topic: Topic.
        partition: Partition.
        first: First offset.
        last: Offset after the last record: where Spark shows the batch to end.
    """

    topic: str
    partition: int
    first: int
    last: int


_KINDS = (StringType(), IntegerType(), LongType(), LongType())
SCHEMA: Final = StructType([StructField(*field) for field in zip(OffsetRange._fields, _KINDS, strict=True)])


class Planner(Protocol):
    """What the driver decides for the source. One thread at a time calls it."""

    def initial(self) -> Offsets:
        """Where the flow stands."""
        ...

    def prepare(self) -> None:
        """The query reads up to the current ends, and then stops (`availableNow`)."""
        ...

    def latest(self, start: Offsets | None, *, everything: bool) -> Offsets:
        """Where the next batch ends; `start`, or where the last batch ended, if there is nothing to read.

        Args:
            start: Where Spark begins it; None before Spark 4.2.
            everything: The batch has no limit.
        """
        ...

    def newest(self) -> Offsets:
        """The ends of the log, as far as the driver has last seen them."""
        ...

    def ranges(self, end: Offsets) -> Sequence[OffsetRange]:
        """What the next batch reads: from where the flow stands, whatever Spark says, up to an end."""
        ...


class PlanServer:
    """Answers the sources of one aggregator, until it is closed.

    Args:
        planner: Decides.
        failed: Called with what it raises, before the source gets that as a text.

    Attributes:
        address: Path of its socket.
    """

    def __init__(self, planner: Planner, failed: Callable[[Exception], None]) -> None:
        self._planner = planner
        self._failed = failed
        self._directory, self._in_use = socket_directory("headwater-plan-")  # of this user only
        self.address = str(self._directory / "socket")
        self._listener = Listener(self.address, "AF_UNIX")
        self._lock = threading.Lock()
        self._closed = False
        self._connections: list[Connection] = []
        threading.Thread(target=self._accept, name="headwater-plan", daemon=True).start()

    def close(self) -> None:
        """Stop to answer."""
        self._closed = True
        with suppress(OSError):
            Client(self.address, "AF_UNIX").close()  # its thread waits for one
        self._listener.close()
        for connection in self._connections:  # the thread that reads it closes it
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as channel:
                channel.shutdown(socket.SHUT_RDWR)
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._in_use)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            if self._closed:
                return
            self._connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), name="headwater-plan", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            while True:
                function, arguments = json.loads(connection.recv_bytes())
                try:
                    with self._lock:
                        answer = {"result": getattr(self._planner, function)(**arguments)}
                except Exception as error:
                    self._failed(error)
                    answer = {"error": f"{type(error).__name__}: {error}"}
                connection.send_bytes(json.dumps(answer).encode())


class RangeSource(DataSource):
    """The streaming source `headwater`. `Aggregator.read_stream` registers and loads it."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> "RangeReader":
        return RangeReader(self.options[ADDRESS])


class RangePartition(InputPartition):
    """One range of a batch."""

    def __init__(self, row: Sequence[Any]) -> None:
        self.row = OffsetRange(*row)


class _Reader(DataSourceStreamReader):
    """Asks the driver."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def _ask(self, function: str, **arguments: Any) -> Any:
        if self._connection is None:
            self._connection = Client(self._address, "AF_UNIX")
        self._connection.send_bytes(json.dumps([function, arguments]).encode())
        answer = json.loads(self._connection.recv_bytes())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def initialOffset(self) -> Offsets:
        found: Offsets = self._ask("initial")
        return found

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        return [RangePartition(row) for row in self._ask("ranges", end=end)]

    def read(self, partition: InputPartition) -> Iterator[OffsetRange]:
        assert isinstance(partition, RangePartition)
        yield partition.row

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()


if IS_LIMITED:

    class RangeReader(_Reader, SupportsTriggerAvailableNow):
        """Reads ranges, as many as Spark asks for."""

        def getDefaultReadLimit(self) -> ReadLimit:
            return ReadMaxRows(1)  # how many records that is, the driver decides

        def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
            found: Offsets = self._ask("latest", start=start, everything=isinstance(limit, ReadAllAvailable))
            return found

        def reportLatestOffset(self) -> Offsets:
            found: Offsets = self._ask("newest")
            return found

        def prepareForTriggerAvailableNow(self) -> None:
            self._ask("prepare")

else:

    class RangeReader(_Reader):  # type: ignore[no-redef]
        """Reads ranges up to the end of the log."""

        def latestOffset(self) -> Offsets:  # type: ignore[override]
            found: Offsets = self._ask("latest", start=None, everything=True)
            return found
