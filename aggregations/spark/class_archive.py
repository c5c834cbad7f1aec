"""An archive of the classes that Spark's JVM loads, so that it reads and verifies them only once on a machine.

Java calls it a dynamic archive of class-data sharing (JEP 350). The JVM of the first run writes it when it ends, which
takes a few seconds. Java itself compares an archive with its own version and with every jar, and ignores one that does
not fit. Measured: the JVM's CPU time until the first commit is 2.2 s instead of 4.0.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from persistence.directories import cache_dir

_CLASSES: Final = "stream"
"""What runs load: another name where they load others, so that an archive without those is not used."""
_WRITE_SECONDS: Final = 60.0
"""Longest time that the end of a process waits for the archive."""
_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off -XX:+DisplayVMOutputToStderr"
_JAVA_OPTIONS: Final = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
_CLASS_PATHS: Final = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")
_LOG = logging.getLogger("headwater.spark")


class ClassArchive:
    """The archive for one Java and one Spark.

    There is none if the user's own Java options are about archives, or if the class path has a directory with files,
    such as `SPARK_CONF_DIR`: Java archives no classes then.

    Args:
        spark_home: Directory of Spark.
        conf: Settings of the JVM.
        environment: Environment variables of the JVM.
    """

    def __init__(self, spark_home: str, conf: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._path: Path | None = None
        self._written: Path | None = None
        self._lock = -1
        self._process = os.getpid()
        home = environment.get("JAVA_HOME")
        java = Path(home, "bin", "java") if home else Path(shutil.which("java", path=environment.get("PATH")) or "")
        if _sets_archive(conf, environment) or _has_directories(spark_home, conf, environment):
            return
        with suppress(OSError):
            java = java.resolve(strict=True)
            about = [str(java), java.stat().st_mtime_ns, java.stat().st_size, spark_home, _CLASSES]
            name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
            self._path = cache_dir() / "classes" / f"spark-{name}.jsa"

    def options(self) -> str:
        """Java options with which the JVM uses the archive, or writes it if there is none; empty if neither is possible.

        Of several processes one writes it.
        """
        if self._path is None:
            return ""
        if self._path.exists():
            return f'"-XX:SharedArchiveFile={self._path}" {_QUIET}'
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in self._path.parent.glob(f"{self._path.stem}.*.tmp"):  # by a process that was killed
                left.unlink()
            self._written = self._path.with_suffix(f".{os.getpid()}.tmp")
            return f'"-XX:ArchiveClassesAtExit={self._written}" {_QUIET}'
        self._release()
        return ""

    def finish(self, jvm: "subprocess.Popen[bytes]") -> None:
        """End a JVM that writes the archive, and keep the archive if it is complete. Does nothing for other JVMs."""
        if self._written is None or self._path is None or self._process != os.getpid():
            return
        try:
            if jvm.stdin is not None:
                jvm.stdin.close()
            if jvm.poll() is None:
                _LOG.info("archiving Spark's classes, once, so that it starts faster; this takes some seconds")
            if jvm.wait(_WRITE_SECONDS) == 0 and self._written.exists():
                self._written.rename(self._path)
        except (OSError, subprocess.TimeoutExpired, KeyboardInterrupt):
            jvm.kill()
        finally:
            with suppress(OSError):
                self._written.unlink(missing_ok=True)
            self._written = None
            self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sets_archive(conf: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    given = [environment.get(name, "") for name in _JAVA_OPTIONS]
    given += [value for name, value in conf.items() if name.endswith("JavaOptions")]
    return any(word in text for text in given for word in ("-Xshare", "SharedArchiveFile", "ArchiveClassesAtExit"))


def _has_directories(spark_home: str, conf: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    configured = environment.get("SPARK_CONF_DIR") or str(Path(spark_home, "conf"))
    return (
        any(Path(configured).glob("*"))
        or any(environment.get(name) for name in _CLASS_PATHS)
        or "spark.driver.extraClassPath" in conf
    )
