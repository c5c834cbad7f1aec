"""Jars of Spark's own Kafka source, which peers read with; headwater does not."""

import re
from pathlib import Path
from typing import Final

import pyspark

from benchmarks.peers.base import PeerUnavailable
from jobs.stack import jars

CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
VERSIONS: Final = {"4.0": "4.0.0", "4.1": "4.1.1", "4.2": "4.2.0", "4.3": "4.2.0"}
"""The connector for each line of Spark, whose releases it serves. PySpark may be released before its connector is on
Maven Central, so 4.3 uses that of 4.2.0, which works with it.
"""


def fetch_connector() -> None:
    """Fetch the connector before anything is timed.

    Raises:
        PeerUnavailable: It does not resolve for this PySpark.
    """
    try:
        kafka_connector()
    except jars.JarsUnavailable as error:
        raise PeerUnavailable(str(error)) from error


def kafka_connector() -> list[Path]:
    """Return the connector and what it needs beside PySpark's own jars.

    Raises:
        JarsUnavailable: They do not resolve for this PySpark.
    """
    ours = {_artifact(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    version = VERSIONS.get(pyspark.__version__.rpartition(".")[0], pyspark.__version__)
    return [jar for jar in jars.resolve("spark-kafka", [f"{CONNECTOR}:{version}"]) if _artifact(jar) not in ours]


def _artifact(jar: Path) -> str:
    """Name of an artifact without its version: `a-b` of `a-b-1.2.jar`."""
    return re.sub(r"-\d[\w.+-]*$", "", jar.stem)
