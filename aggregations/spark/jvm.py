"""The JVM of Spark's driver. It starts as early as its settings are known, while Python still imports.

This module imports PySpark only when it connects to a JVM.
"""

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from aggregations.spark.class_archive import ClassArchive
from aggregations.spark.python_ahead import PythonAhead

DEFAULT_MASTER: Final = "local[2]"
"""Spark's master when none is given."""
MASTER, NAME = "spark.master", "spark.app.name"

EXECUTABLES: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
"""Environment variables that tell Spark where Python is."""
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
IS_SUBMITTED: Final = _PORT in os.environ
"""Whether `spark-submit` started this program: then there is a JVM."""

_ADDRESS: Final = "_PYSPARK_DRIVER_CONN_INFO_PATH"
_OPTIONS: Final = "SPARK_SUBMIT_OPTS"  # Java options, before those of Spark's settings
# No record passes through the JVM: what its second compiler saves is less than what it costs. Measured: about 1 CPU
# second per million events instead of 3.
_JAVA: Final = "-XX:TieredStopAtLevel=1"
_POLL_SECONDS: Final = 0.02
_POOLS: Final = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment_of(before: Mapping[str, str], master: str) -> dict[str, str]:
    """Environment variables for Spark's launcher and workers, with this interpreter; existing ones are kept."""
    ours = dict.fromkeys(EXECUTABLES, sys.executable)
    if not is_local(master):
        return {**ours, **before}
    ours["SPARK_LOCAL_IP"] = "127.0.0.1"
    options = {_OPTIONS: f"{_JAVA} {before.get(_OPTIONS, '')}".strip()}  # what comes later wins
    return {**ours, **before, **options}


def is_local(master: str) -> bool:
    """Whether all workers are on this machine."""
    return master.startswith("local")


def start_ahead(master: str | None, conf: Mapping[str, str]) -> None:
    """Start the JVM that a context of this process is going to need.

    It ends with the process if nothing uses it. Does nothing if there is a JVM already.

    Args:
        master: Spark's master.
        conf: Spark's settings, which override `master`.
    """
    global _ahead
    with _lock:
        if _ahead is None and not IS_SUBMITTED and not _has_jvm():
            wanted = {MASTER: master or DEFAULT_MASTER, **conf}
            _ahead = Jvm(wanted, environment_of(os.environ, wanted[MASTER]))


@contextmanager
def jvm_ahead(master: str | None, conf: Mapping[str, str]) -> Iterator[None]:
    """Start the JVM of a context that this block is going to need; end it with the block if nothing has used it."""
    start_ahead(master, conf)
    try:
        yield
    finally:
        if (jvm := _taken()) is not None:
            jvm.kill()


def started(conf: Mapping[str, str], environment: Mapping[str, str]) -> "Jvm":
    """The JVM that was started ahead if it was started with these settings and variables, else another one."""
    jvm = _taken()
    if jvm is not None and jvm.asked == (_at_start(conf), environment):
        return jvm
    if jvm is not None:
        jvm.kill()
    return Jvm(conf, environment)


_lock = threading.Lock()
_ahead: "Jvm | None" = None


def _taken() -> "Jvm | None":
    global _ahead
    with _lock:
        jvm, _ahead = _ahead, None
    return jvm


def _has_jvm() -> bool:
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return getattr(context, "_gateway", None) is not None


class Jvm:
    """A JVM that starts. It ends with this process, when its standard input is closed, and no signal reaches it.

    A terminal sends signals to the process group, systemd sends them to every process of a service.

    Args:
        conf: Settings that the JVM needs from the beginning, such as its memory.
        environment: Its environment variables.

    Attributes:
        asked: Both.
        executable: What its contexts take for Python; None for the interpreter.
        process: Its process.
    """

    def __init__(self, conf: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        self.asked = _at_start(conf), dict(environment)
        home = _spark_home()
        self._archive = ClassArchive(home, conf, environment) if is_local(conf[MASTER]) else None
        self._directory = Path(tempfile.mkdtemp(prefix="headwater-jvm-"))
        self._address = self._directory / "address"
        own = {"SPARK_HOME": home, "SPARK_CONNECT_MODE": "0", _ADDRESS: str(self._address)}
        if self._archive is not None:
            own[_OPTIONS] = f"{self._archive.options()} {environment.get(_OPTIONS, '')}".strip()
        self._python_ahead = python_ahead(conf, environment)
        self.executable = None if self._python_ahead is None else self._python_ahead.executable
        if self.executable is not None:
            own |= dict.fromkeys(EXECUTABLES, self.executable)
        settings = [word for pair in self.asked[0].items() for word in ("--conf", "=".join(pair))]
        arguments = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        self.process = subprocess.Popen(
            # The shell lets the JVM ignore SIGINT, which would end it.
            [
                "/bin/sh",
                "-c",
                'trap "" INT; exec "$@"',
                "sh",
                str(Path(home, "bin", "spark-submit")),
                *settings,
                *arguments,
            ],
            stdin=subprocess.PIPE,
            env={**environment, **own},
            start_new_session=True,
        )
        self._used = False
        atexit.register(self._end)

    def connect(self, stop: threading.Event) -> Any:
        """Wait until the JVM answers, and return PySpark's gateway to it.

        Raises:
            StoppedError: `stop` was set meanwhile; the JVM was ended.
            PySparkRuntimeError: The JVM ended; it wrote the reason to standard error.
        """
        from pyspark.errors import PySparkRuntimeError
        from pyspark.java_gateway import launch_gateway

        from aggregations.engine.retry import StoppedError

        while not self._address.exists():
            if stop.is_set():
                self.kill()
                raise StoppedError
            if self.process.poll() is not None:
                self.kill()
                raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})
            time.sleep(_POLL_SECONDS)
        answer = self._address.read_bytes()  # a number of four bytes, and a text with its length
        shutil.rmtree(self._directory)
        self._used = True
        where = {_PORT: str(int.from_bytes(answer[:4])), _SECRET: answer[8:].decode()}
        os.environ.update(where)
        try:
            gateway = launch_gateway()  # type: ignore[no-untyped-call]
        finally:
            for name in where:
                del os.environ[name]
        gateway.proc = self.process
        return gateway

    def kill(self) -> None:
        """End the JVM, which nothing has used."""
        atexit.unregister(self._end)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._python_ahead is not None:
            self._python_ahead.end()
        if self._archive is not None:
            self._archive.finish(self.process)

    def _end(self) -> None:
        """End the JVM with this process."""
        if os.getpid() != self._owner:
            return
        if not self._used:
            self.kill()
        else:
            if self._python_ahead is not None:
                self._python_ahead.end()
            if self._archive is not None:
                self._archive.finish(self.process)


def can_fork(conf: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether Spark's Python processes are of this machine and this interpreter, so that they can be forked."""
    python = conf.get("spark.pyspark.python", environment["PYSPARK_PYTHON"])
    return is_local(conf[MASTER]) and python == sys.executable and not conf[MASTER].startswith("local-cluster")


def python_ahead(conf: Mapping[str, str], environment: Mapping[str, str]) -> PythonAhead | None:
    """What Spark's Python processes are forked from; None if they cannot be."""
    if not can_fork(conf, environment):
        return None
    settings = {**worker_settings(conf[MASTER], environment), **conf}
    prefix = "spark.executorEnv."
    variables = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    ours = {"PYTHONHASHSEED": environment.get("PYTHONHASHSEED", "0"), "PYTHONUNBUFFERED": "YES"}
    ahead = PythonAhead({**environment, **ours, **variables})
    if not os.access(ahead.executable, os.X_OK):  # nothing may be executed in the directory for temporary files
        ahead.end()
        return None
    return ahead


def worker_settings(master: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings for the environment of Python workers."""
    # One task has one core; with larger thread pools, tasks would only wait for each other.
    settings = {f"spark.executorEnv.{name}": environment.get(name, "1") for name in _POOLS}
    return {**settings, "spark.executorEnv.PYTHONPATH": _modules_path(environment)} if is_local(master) else settings


def _modules_path(environment: Mapping[str, str]) -> str:
    """Where this process finds its modules, for workers of this machine."""
    mine = [path or str(Path.cwd()) for path in sys.path if not path.endswith((".zip", ".jar"))]
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([*given, *mine]))


def _at_start(conf: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in conf.items() if name != NAME}  # the context has it


@cache
def _spark_home() -> str:
    """Directory of Spark, as PySpark finds it; importing PySpark takes longer."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    found = spec_from_file_location("find_spark_home", Path(spec.origin).with_name("find_spark_home.py"))
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return str(module._find_spark_home())
