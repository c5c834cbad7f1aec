"""The Spark context that a flow runs in: an existing one, that of spark-submit, or a new one.

The submitter decides: settings of `spark-submit` (options, `--conf`, properties files) override those of the program
and of the engine, including the master, the name and the deploy mode.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, __version__

from aggregations.engine.retry import StoppedError
from aggregations.errors import SparkEndedError
from aggregations.spark.jvm import (
    DEFAULT_MASTER,
    IS_SUBMITTED,
    MASTER,
    NAME,
    Jvm,
    can_fork,
    environment_of,
    is_local,
    started,
    worker_settings,
)
from persistence.kafka.settings import SECRET_NAMES

NEEDED = {
    "spark.speculation": "false",  # two simultaneous attempts of a task would conflict
    "spark.python.daemon.module": "aggregations.spark.daemon",
}
"""Settings that exactness depends on; they cannot be overridden."""

_MANAGER = "org.apache.spark.sql.execution.streaming.{}FileSystemBasedCheckpointFileManager"
_CHECKPOINT = {
    "spark.sql.streaming.checkpointFileManagerClass": _MANAGER.format(
        "" if __version__.startswith("4.0.") else "checkpointing."
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.minBatchesToRetain": "2",
}
"""Settings for a checkpoint that nothing depends on. Measured: 40 to 50 ms a batch for Spark's two logs instead of 130 to 190."""
_WARMING_SECONDS = 5.0
_REDACTED = "spark.redaction.regex"
_SECRETS = f"(?i:secret|password|token|access[.]?key|url|user|{SECRET_NAMES.removeprefix('(?i)')})"
_LOG = logging.getLogger("headwater.spark")


@contextmanager
def session(
    name: str,
    *,
    modules: Sequence[Path] = (),
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Iterator[SparkContext]:
    """The existing context as it is, or one that is started and stopped.

    Signal handlers of this process stay as they are.

    Args:
        name: Name of the application, unless one was submitted.
        modules: Python files that workers import by name.
        master: Spark's master; None for the submitted one, else `DEFAULT_MASTER`.
        conf: Settings that override the engine's; submitted settings override both.
        stop: Set it to end a start that is under way.

    Raises:
        StoppedError: `stop` was set before the context had started.
        SparkEndedError: The existing context's JVM ended.
    """
    stop = stop or threading.Event()
    with _entered(stop):
        spark = _existing() or _own.start(name, modules, master, conf or {}, stop)
        if spark is _own.spark:
            _own.users += 1
    try:
        yield spark
    finally:
        with _lock:
            if spark is _own.spark:
                _own.leave()


_lock = threading.Lock()


@contextmanager
def _entered(stop: threading.Event) -> Iterator[None]:
    """One thread at a time starts Spark."""
    while not _lock.acquire(timeout=0.1):
        if stop.is_set():
            raise StoppedError
    try:
        yield
    finally:
        _lock.release()


def _existing() -> SparkContext | None:
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)  # without one, the JVM started this program
    ended = process is not None and process.poll() is not None
    found = SparkContext._active_spark_context
    if found is None:
        if ended:
            _forget_jvm()
        return None
    if ended or getattr(found, "_jsc", None) is None:
        raise SparkEndedError("the SparkContext of this program has ended, or has not started yet. Stop it, or wait")
    return found


def _forget_jvm() -> None:
    """Let the next context start another JVM: the old one ended."""
    SparkContext._gateway = SparkContext._jvm = None
    if _own.jvm is not None:
        _own.jvm.kill()
        _own.jvm = None


class _Own:
    """The context that this module started for runs of this process, which share it.

    Attributes:
        spark: The context; None if there is none.
        users: Number of runs that use it.
        jvm: The JVM that was started for it; None if there was one.
    """

    spark: SparkContext | None = None
    users = 0
    _before: Mapping[str, str]
    jvm: Jvm | None = None
    _warming: threading.Thread | None = None

    def start(
        self,
        name: str,
        modules: Sequence[Path],
        master: str | None,
        conf: Mapping[str, str],
        stop: threading.Event,
    ) -> SparkContext:
        """Start the context; see `session`."""
        theirs = submitted()
        wanted = _wanted(name, master, conf, theirs)
        settings = _settings(wanted)
        if self.spark is None:  # else another part of this program stopped it
            self._before = dict(os.environ)
        self.users = 0
        os.environ.update(environment_of(self._before, wanted[MASTER]))
        try:
            with _startable(stop):
                if not theirs and SparkContext._gateway is None:
                    self.jvm = _launch(wanted, stop)
                self.spark = SparkContext(conf=SparkConf().setAll(list(settings.items())))
            if self.jvm is not None and self.jvm.executable is not None and can_fork(wanted, os.environ):
                self.spark.pythonExec = self.jvm.executable
            if stop.is_set():  # at the last moment: the JVM may have been ended
                raise StoppedError
            if "spark.log.level" not in theirs:
                self.spark.setLogLevel("ERROR")
            for module in modules:
                self.spark.addPyFile(str(module))
            if is_local(wanted[MASTER]):
                from aggregations.spark.action import warm_up

                self._warming = warm_up(self.spark)
        except BaseException:
            self.end()
            raise
        return self.spark

    def leave(self) -> None:
        """End one run's use of the context, and the context after the last one."""
        self.users -= 1
        if not self.users:
            self.end()

    def end(self) -> None:
        """Stop the context, if there is one, and restore the environment."""
        spark, self.spark = self.spark, None
        if spark is not None:
            if self._warming is not None:  # tasks that a stop cuts off are reported as lost
                self._warming.join(_WARMING_SECONDS)
            with suppress(Py4JError, ConnectionError):
                spark.stop()
            spark.stop()  # what is left of it if its JVM had ended
        os.environ.clear()
        os.environ.update(self._before)


_own = _Own()


def submitted() -> dict[str, str]:
    """Settings given to `spark-submit` by options, `--conf` and properties files; empty without spark-submit."""
    if not IS_SUBMITTED:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def master_of(master: str | None, conf: Mapping[str, str]) -> str:
    """The effective master: of the existing context, else the submitted one, that of `conf`, `master`, the default."""
    found = SparkContext._active_spark_context
    if found is not None and (its := getattr(found, "master", None)):  # none while another thread starts it
        return str(its)
    return {MASTER: master or DEFAULT_MASTER, **conf, **submitted()}[MASTER]


def _wanted(name: str, master: str | None, conf: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Settings that override the engine's. Ignored settings of the program are logged, without their values."""
    ours = {**({MASTER: master} if master else {}), **conf}
    if lost := [key for key, value in ours.items() if theirs.get(key, value) != value]:
        _LOG.warning("spark-submit was given %s; the program's own setting is not used", ", ".join(lost))
    return {NAME: name, MASTER: DEFAULT_MASTER, **ours, **theirs}


@contextmanager
def _startable(stop: threading.Event) -> Iterator[None]:
    """Start Spark in the block, which takes ten seconds or more: a stop ends the JVM, and so the start.

    PySpark replaces the handler of SIGINT; it is put back.
    """
    handler = signal.getsignal(signal.SIGINT)
    started = threading.Event()

    def watch() -> None:
        while not started.wait(0.1):
            if stop.is_set() and (process := getattr(SparkContext._gateway, "proc", None)):
                process.kill()
                return

    watcher = threading.Thread(target=watch, name="headwater-spark-start", daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        if not stop.is_set():
            raise
        _forget_jvm()
        raise StoppedError from None
    finally:
        started.set()
        watcher.join()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _launch(wanted: Mapping[str, str], stop: threading.Event) -> Jvm:
    """Start a JVM that no signal reaches, or take the one that was started ahead: this process stops Spark."""
    jvm = started(wanted, dict(os.environ))
    gateway = jvm.connect(stop)
    SparkContext._ensure_initialized(gateway=gateway)
    signals = gateway.jvm.sun.misc
    with suppress(Py4JError):  # under -Xrs Java handles no signals
        signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
    return jvm


def _settings(wanted: Mapping[str, str]) -> dict[str, str]:
    """The engine's settings, and the wanted ones: the name, the master, and settings that win over the engine's."""
    settings = {
        **({} if IS_SUBMITTED else {"spark.ui.enabled": "false"}),
        "spark.ui.showConsoleProgress": "false",
        **NEEDED,
        **_CHECKPOINT,
        "spark.python.worker.reuse": "true",
        **worker_settings(wanted[MASTER], os.environ),
    }
    if is_local(wanted[MASTER]):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.shuffle.compress": "false"}  # it reaches no network, and most of it is compressed
    # What the user wants redacted comes on top of what has to be.
    more = wanted.get(_REDACTED)
    return {**settings, **wanted, _REDACTED: f"{_SECRETS}|(?:{more})" if more else _SECRETS}
