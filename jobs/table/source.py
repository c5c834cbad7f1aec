"""States as a table in Spark: `spark.read.format("headwater")`."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from aggregations.errors import FlowError
from aggregations.spark.source import ADDRESS, RangeSource
from jobs import settings
from jobs.environment import UsageError
from jobs.loading import load_flow
from jobs.table.arrow import arrow_schema
from jobs.table.view import key_of
from jobs.views import States, states
from persistence.registry import open_store

_OPTIONS: Final = ("flow", "stage", "store", "generation", "prefix", "where", "histories")


class StatesSource(RangeSource):
    """Reads the states of a stage into Spark, each bucket of its store by a task of its own.

        spark.dataSource.register(StatesSource)
        spark.read.format("headwater").option("flow", "fleet:flow").option("stage", "carrier").load()

    Supported: reading, also while the flow runs; `CREATE TEMPORARY VIEW ... USING headwater OPTIONS (...)`.
    Not supported: writing, a schema of the reader's own. As a stream, `headwater` is the source of
    `Aggregator.read_stream`, which this class can serve as well.

    Options, of which only `flow` is required:

    - `flow`: `MODULE:FLOW`. The process that plans the query imports it; executors need the module only for a fold in
      plain Python.
    - `stage`: the stage, if the flow has several.
    - `store`: the store's URL. Without it: as for `headwater inspect`. Spark shows options in its plans: let the URL
      name a file that contains the password.
    - `generation`: generation of the states.
    - `prefix`, `where`: only some states; see `jobs.states`. Spark evaluates conditions of a query after it has read the
      states, these are evaluated while they are read.
    - `histories`: `true` adds the positions that each state holds.
    """

    def schema(self) -> StructType:
        """The columns of `States.schema`."""
        if ADDRESS in self.options:
            return super().schema()
        return _schema_of(self._states())

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of all buckets.

        Raises:
            FlowError: The query gives another schema.
        """
        found = self._states()
        own = _schema_of(found)
        if [(one.name, one.dataType) for one in schema] != [(one.name, one.dataType) for one in own]:
            raise FlowError("the format headwater has a schema of its own: leave schema() out and select() columns")
        return _Reader(found)

    def _states(self) -> States:
        given: Mapping[str, str] = self.options
        if unknown := sorted({name.lower() for name in given} - {*_OPTIONS}):
            raise UsageError(f"the format headwater has no option {unknown[0]!r}; choose from {', '.join(_OPTIONS)}")
        if "flow" not in given:
            raise UsageError('the format headwater needs the option "flow", for example "fleet:flow"')
        flow = load_flow(given["flow"])
        stage = settings.stage_of(flow, given.get("stage"))
        store, number = given.get("store"), given.get("generation")
        if number is not None and not (number.isdecimal() and int(number) > 0):
            raise UsageError(f"option generation: {number!r} is not a number above 0")
        if (histories := given.get("histories", "false").lower()) not in ("true", "false"):
            raise UsageError(f"option histories: {histories!r} is neither true nor false")
        chosen = settings.of_flow(flow, [store] if store else None, generation=int(number) if number else None)
        return states(
            flow,
            stage,
            chosen.stores,
            generation=chosen.generation,
            prefix=key_of(given.get("prefix", "")),
            where=given.get("where"),
            histories=histories == "true",
        )


class _Reader(DataSourceReader):
    """Reads one bucket a task."""

    def __init__(self, found: States) -> None:
        self._states = found

    def partitions(self) -> list[InputPartition]:
        with closing(open_store(self._states.url)) as store:
            if not store.capabilities.shared:
                raise FlowError("the store is in the memory of one process: give another one with the option store")
            return [InputPartition(bucket) for bucket in store.marks(self._states.ref)] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        found = self._states
        return replace(found, selection=replace(found.selection, bucket=partition.value)).batches()


def _schema_of(found: States) -> StructType:
    schema: StructType = from_arrow_schema(arrow_schema(found.schema))
    return schema
