"""The Spark session that a flow runs in."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from persistence.kafka.settings import SECRET_NAMES


def session(
    name: str,
    *,
    jars: Sequence[Path] = (),
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the session, starting one if there is none.

    Args:
        name: Name of the application.
        jars: Spark's Kafka connector with what it needs; empty when Spark has it already.
        master: Spark's master.
        conf: Settings that win over ours.
    """
    _environment()
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**_settings(jars, master), **(conf or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _environment() -> None:
    """What workers need to connect back, with this interpreter and these modules."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    mine = [path or str(Path.cwd()) for path in sys.path if not path.endswith(".zip")]
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*before, *mine]))
    # One task has one core; a pool of its own for each of these only makes them wait for each other.
    for pool in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(pool, "1")


def _settings(jars: Sequence[Path], master: str) -> dict[str, str]:
    checkpoint = "org.apache.spark.sql.execution.streaming."
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 1):
        checkpoint += "checkpointing."
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.speculation": "false",
        "spark.sql.adaptive.enabled": "false",  # it would join the tasks of a shuffle
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.python.daemon.module": "aggregations.spark.daemon",
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        "spark.sql.streaming.checkpointFileManagerClass": f"{checkpoint}FileSystemBasedCheckpointFileManager",
        "spark.sql.streaming.minBatchesToRetain": "2",
        "spark.redaction.regex": f"(?i)secret|password|token|access[.]?key|url|user|{SECRET_NAMES.removeprefix('(?i)')}",
    }
    if jars:
        settings["spark.jars"] = ",".join(str(jar) for jar in jars)
        settings["spark.driver.extraClassPath"] = os.pathsep.join(str(jar) for jar in jars)
    if master.startswith("local"):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # Right for our checkpoint only because it is local and disposable.
            "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        }
    return settings
