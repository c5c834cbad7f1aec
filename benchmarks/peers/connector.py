"""Jars of Spark's own Kafka source, which peers read with; headwater does not."""

import re
from pathlib import Path
from typing import Final

import pyspark

from jobs.stack import jars

CONNECTOR: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13"
CONNECTOR_OF_4_0: Final = "4.0.0"
"""The connector of Spark 4.0.0 serves every 4.0.x."""


def kafka_connector() -> list[Path]:
    """Return the connector and what it needs beside PySpark's own jars.

    Raises:
        JarsUnavailable: They do not resolve for this PySpark.
    """
    ours = {_artifact(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    version = CONNECTOR_OF_4_0 if pyspark.__version__.startswith("4.0.") else pyspark.__version__
    return [jar for jar in jars.resolve("spark-kafka", [f"{CONNECTOR}:{version}"]) if _artifact(jar) not in ours]


def _artifact(jar: Path) -> str:
    """Name of an artifact without its version: `a-b` of `a-b-1.2.jar`."""
    return re.sub(r"-\d[\w.+-]*$", "", jar.stem)
