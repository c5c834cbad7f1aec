"""Spark's Python daemon, warmed: what every worker needs is imported once, before it forks them.

Spark calls `importlib.invalidate_caches()` in every task, which reads the directory of pyspark.zip
again: 0.45 s a task were measured. Nothing is added to that archive while we run.
"""

import gc
import zipimport


def _do_nothing(importer: zipimport.zipimporter) -> None:
    """The archive does not change."""


def main() -> None:
    """Run the daemon until Spark closes it."""
    zipimport.zipimporter.invalidate_caches = _do_nothing  # type: ignore[method-assign,assignment]

    import pandas  # noqa: ICN001, F401 - Spark's worker imports it in every task
    import polars  # noqa: ICN001, F401
    import pyarrow  # noqa: ICN001, F401
    import pyspark.worker  # noqa: F401
    from pyspark import daemon

    import aggregations.spark.tasks  # noqa: F401

    gc.collect()
    gc.freeze()  # what is there stays shared between the forks
    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
