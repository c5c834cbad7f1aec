"""The line that submits a flow."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark

from jobs.submit import entry


def submit_line(
    name: str,
    arguments: Sequence[str],
    *,
    master: str,
    deploy_mode: str = "client",
    py_files: Sequence[str] = (),
    conf: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the program and the arguments that submit a command of headwater.

    Args:
        name: Name of the application.
        arguments: The command with its options: `run fleet:flow ...`.
        master: Spark's master.
        deploy_mode: Where the driver runs: `client`, here, or `cluster`.
        py_files: Modules and archives of modules that the workers need.
        conf: Spark settings.
    """
    settings = {"spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    if deploy_mode == "client":
        settings["spark.pyspark.driver.python"] = sys.executable
    return [
        str(_home() / "bin" / "spark-submit"),
        *("--master", master),
        *("--deploy-mode", deploy_mode),
        *("--name", name),
        *(["--py-files", ",".join(py_files)] if py_files else []),
        *(text for key, value in {**settings, **(conf or {})}.items() for text in ("--conf", f"{key}={value}")),
        str(Path(entry.__file__).absolute()),
        *arguments,
    ]


def _home() -> Path:
    """The Spark that submits: `SPARK_HOME`, else PySpark's own."""
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
