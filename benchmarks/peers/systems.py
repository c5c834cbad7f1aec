"""Every system by name, in the order in which they take turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchmarks.peers.base import Peer
from benchmarks.peers.headwater import Headwater
from benchmarks.peers.kafka_streams import KafkaStreams, KafkaStreamsCassandra, KafkaStreamsSink
from benchmarks.peers.python_loop import PythonLoop
from benchmarks.peers.spark_pandas_state import SparkPandasState
from benchmarks.peers.stream import HeadwaterArchive, HeadwaterStream

_SYSTEMS: Final[Mapping[str, Callable[[Sequence[str]], Sequence[Peer]]]] = {
    Headwater.name: lambda stores: [Headwater(store) for store in stores],
    HeadwaterStream.name: lambda stores: [HeadwaterStream(store) for store in stores],
    HeadwaterArchive.name: lambda stores: [HeadwaterArchive(store) for store in stores],
    KafkaStreams.name: lambda stores: [KafkaStreams()],
    KafkaStreamsSink.name: lambda stores: [KafkaStreamsSink()],
    KafkaStreamsCassandra.name: lambda stores: [KafkaStreamsCassandra()],
    PythonLoop.name: lambda stores: [PythonLoop()],
    SparkPandasState.name: lambda stores: [SparkPandasState()],
}

NAMES: Final = tuple(_SYSTEMS)
STORES: Final = ("lmdb", "redis", "sqlite", "cassandra")
"""Stores that headwater can be measured on: first the embedded and the shared one that most runs use."""
DEFAULT_STORES: Final = STORES[:2]


def chosen(only: Sequence[str], stores: Sequence[str]) -> list[Peer]:
    """Return the systems of these names; headwater once for each store."""
    return [peer for name in NAMES if name in only for peer in _SYSTEMS[name](stores)]
