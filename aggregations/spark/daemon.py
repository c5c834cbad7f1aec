"""Spark's Python daemon, with warm-up: modules that every worker needs are imported once, before it forks workers.

Spark calls `importlib.invalidate_caches()` in every task, which reads the directory of pyspark.zip
again: measured at 0.45 s per task. Nothing is added to that archive during a run.
"""

import gc
import os
import signal
import sys
import zipimport
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_LOADED_SECONDS = 2.0
"""More CPU time than it takes to load compiled code, and much less than it takes to compile it."""
_COMPILES = b"headwater: compiling code for this machine, once; this takes half a minute or more\n"


def _do_nothing(importer: zipimport.zipimporter) -> None:
    """The archive does not change."""


def _from_package() -> None:
    """Import PySpark from the package that its archive is part of, if there is one: the archive has no bytecode.

    Measured: 0.4 s of CPU instead of 1.4.
    """
    before = list(sys.path)
    sys.path[:] = [path for path in before if not path.endswith("pyspark.zip")]
    found = find_spec("pyspark")
    own = Path(found.origin).parent / "python" / "lib" / "pyspark.zip" if found and found.origin else None
    if own is None or str(own) not in before:
        sys.path[:] = before


def _load() -> None:
    """Load the code that numba compiles if this machine has not run it before: once, for all residents.

    Two processes compile: what reads messages takes as long as what reads and writes states.
    """
    from aggregations.columns.prepare import prepare

    compiles = False

    def notice(*_: object) -> None:
        nonlocal compiles
        compiles = True
        os.write(2, _COMPILES)

    other = os.fork()
    if not other:
        with suppress(BaseException):  # this process compiles it again, and fails with the same error
            prepare()
        os._exit(0)
    before = signal.signal(signal.SIGPROF, notice)
    signal.setitimer(signal.ITIMER_PROF, _LOADED_SECONDS)
    import aggregations.columns.wire
    import aggregations.spark.message_kernels  # noqa: F401

    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, before)
    if not compiles:
        os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    prepare()


def main() -> None:
    """Run the daemon until Spark closes it."""
    _from_package()
    zipimport.zipimporter.invalidate_caches = _do_nothing  # type: ignore[method-assign,assignment]

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
