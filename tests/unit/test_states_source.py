"""Options of the Spark format, without Spark."""

from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StringType, StructType

from aggregations.errors import FlowError
from jobs import StatesSource
from jobs.environment import NotThereError, UsageError
from jobs.loading import LoadError

MODULE = "tests.support.states_flow"


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"flow": "no_such:flow"}, LoadError, "there is no module no_such"),
        ({"flow": f"{MODULE}:nothing"}, LoadError, "has no 'nothing'"),
        ({"flow": ""}, LoadError, "write MODULE:NAME"),
        ({"stage": "shops"}, NotThereError, "has no stage 'shops'; it has shop"),
        ({"where": "hits > 1"}, FlowError, 'unable to find column "hits"'),
        ({"generation": "0"}, UsageError, "'0' is not a number above 0"),
        ({"histories": "yes"}, UsageError, "'yes' is neither true nor false"),
        ({"stages": "shop"}, UsageError, "no option 'stages'; choose from flow, stage"),
        ({"prefix": "base64:?"}, UsageError, "not valid base64"),
        ({"store": "states"}, UsageError, "write URL or STAGE=URL"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(
    tmp_path: Path, options: dict[str, str], error: type[Exception], why: str
) -> None:
    given = {"flow": f"{MODULE}:flow", "store": f"lmdb://{tmp_path}/none", **options}
    with pytest.raises(error) as refused:
        StatesSource(given).schema()
    assert why in str(refused.value)


def test_the_flow_must_be_given() -> None:
    with pytest.raises(UsageError, match='needs the option "flow"'):
        StatesSource({}).schema()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    source = StatesSource({"flow": f"{MODULE}:flow", "store": f"lmdb://{tmp_path}/none"})
    source.reader(source.schema())
    with pytest.raises(FlowError, match="has a schema of its own"):
        source.reader(StructType().add("_key", StringType()))
    with pytest.raises(FlowError, match="has a schema of its own"):
        source.reader(StructType([*source.schema(), *StructType().add("more", LongType())]))


def test_a_store_in_the_memory_of_a_process_cannot_be_read_by_others() -> None:
    source = StatesSource({"flow": f"{MODULE}:flow", "store": "memory://x"})
    with pytest.raises(FlowError, match="in the memory of one process: give another one with the option store"):
        source.reader(source.schema()).partitions()
