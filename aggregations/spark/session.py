"""The Spark session that a flow runs in."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from persistence.kafka.settings import SECRET_NAMES

_REDACTED = "spark.redaction.regex"
_SECRETS = f"(?i:secret|password|token|access[.]?key|url|user|{SECRET_NAMES.removeprefix('(?i)')})"


@contextmanager
def session(
    name: str,
    *,
    jars: Sequence[Path] = (),
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """The session that there is, with our settings as long as it is used; else one that is started and stopped.

    Args:
        name: Name of the application.
        jars: Spark's Kafka connector with what it needs; empty when Spark has it already.
        master: Spark's master.
        conf: Settings that win over ours.
    """
    settings = _settings(jars, master, conf or {})
    if (found := _running()) is not None:
        with _lent(found, settings):
            yield found
        return
    before = dict(os.environ)
    os.environ.update(_environment(before))
    try:
        builder = SparkSession.builder.appName(name).master(master)
        for key, value in settings.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            spark.sparkContext.setLogLevel("ERROR")
            yield spark
        finally:
            with suppress(Py4JError, ConnectionError):  # its JVM ended
                spark.stop()
    finally:
        os.environ.clear()
        os.environ.update(before)


def master_of(master: str, conf: Mapping[str, str]) -> str:
    """The master that counts: of the session that there is, else `conf`'s, else `master`."""
    found = _running()
    return conf.get("spark.master", master) if found is None else str(found.sparkContext.master)


def _running() -> SparkSession | None:
    # `getActiveSession` is about one thread; whose session this is does not depend on that.
    return None if SparkContext._active_spark_context is None else SparkSession.builder.getOrCreate()


@contextmanager
def _lent(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of a running session, as far as they can be changed there, put back as they were behind us."""
    before = {key: spark.conf.get(key, None) for key in settings if key.startswith("spark.sql.")}
    try:
        for key in before:
            with suppress(AnalysisException):  # fixed when Spark was started
                spark.conf.set(key, settings[key])
        yield
    finally:
        for key, value in before.items():
            with suppress(AnalysisException):
                spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def _environment(before: Mapping[str, str]) -> dict[str, str]:
    """What workers need to connect back, with this interpreter and these modules; what is set already stays."""
    mine = [path or str(Path.cwd()) for path in sys.path if not path.endswith(".zip")]
    given = [path for path in before.get("PYTHONPATH", "").split(os.pathsep) if path]
    ours = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        # One task has one core; a pool of its own for each of these only makes them wait for each other.
        **dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    }
    return {**ours, **before, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*given, *mine]))}


def _settings(jars: Sequence[Path], master: str, conf: Mapping[str, str]) -> dict[str, str]:
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
    # What the user wants redacted comes on top of what has to be.
    wanted = conf.get(_REDACTED)
    return {**settings, **conf, _REDACTED: f"{_SECRETS}|(?:{wanted})" if wanted else _SECRETS}
