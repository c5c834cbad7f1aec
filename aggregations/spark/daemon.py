"""Spark's Python daemon, with warm-up: modules that every worker needs are imported once, before it forks workers.

Spark calls `importlib.invalidate_caches()` in every task, which reads the directory of pyspark.zip
again: measured at 0.45 s per task. Nothing is added to that archive during a run.
"""

import gc
import zipimport


def _do_nothing(importer: zipimport.zipimporter) -> None:
    """The archive does not change."""


def _load() -> None:
    """Load the code that numba compiles if this machine has not run it before: once, for all residents."""
    import aggregations.columns.wire
    import aggregations.spark.message_kernels  # noqa: F401
    from aggregations.columns.prepare import prepare

    prepare()


def main() -> None:
    """Run the daemon until Spark closes it."""
    zipimport.zipimporter.invalidate_caches = _do_nothing  # type: ignore[method-assign,assignment]

    import pandas  # noqa: ICN001, F401 - Spark's worker imports it in every task
    import polars  # noqa: ICN001, F401
    import pyarrow  # noqa: ICN001, F401
    import pyspark.worker  # noqa: F401
    from pyspark import daemon

    import aggregations.spark.tasks  # noqa: F401
    from aggregations.spark import residents

    gc.collect()
    gc.freeze()  # existing objects stay shared between the forks
    residents.supervise(_load)
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
