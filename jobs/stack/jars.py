"""Downloads jars from Maven Central with the Ivy that PySpark contains; Maven is not needed.

A set of jars is downloaded once into a directory of the cache, which appears by a rename: if it exists, it is complete.
A file lock lets one process at a time run Ivy, because Ivy's own cache does not support several.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from xml.sax.saxutils import quoteattr

from jobs.stack.java import java
from persistence.directories import cache_dir

KAFKA_BROKER: Final = ("org.apache.kafka:kafka_2.13:4.3.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4@jar")
"""The broker, and the binding without which it writes no log."""
CASSANDRA: Final = ("org.apache.cassandra:cassandra-all:5.0.9",)
OnDownload = Callable[[str], None]
"""Called with the name of each jar when its download begins."""

_COORDINATE: Final = re.compile(r"(?P<org>[\w.-]+):(?P<name>[\w.-]+):(?P<rev>[\w.-]+?)(?P<alone>@jar)?")
_DOWNLOADING: Final = re.compile(r"downloading \S*/(\S+) \.\.\.")


class JarsUnavailable(RuntimeError):
    """A set of jars could not be downloaded; the text names the remedy."""


def resolve(name: str, coordinates: Sequence[str], *, progress: OnDownload | None = None) -> list[Path]:
    """Return the jars of `coordinates` and their dependencies at run time, sorted by name.

    The first call takes about a minute; later ones need no Java. Several processes may call it at once.
    `HEADWATER_IVY_SETTINGS` names an Ivy settings file, for a mirror of Maven Central.

    Args:
        name: Name of the set in the cache.
        coordinates: `group:artifact:version`; with the suffix `@jar`, a jar without its dependencies.
        progress: Called for each download.

    Raises:
        JarsUnavailable: A coordinate is malformed or not found, the repository cannot be reached, or the cache cannot
            be written.
        JavaUnavailable: Ivy needs Java.
    """
    try:
        return _cached(name, coordinates, progress)
    except OSError as error:
        raise JarsUnavailable(
            f"the cache of jars {cache_dir()} cannot be used: {error.strerror}. Make room there or give this user the "
            "right to write it, or set HEADWATER_CACHE to another directory"
        ) from error


def _cached(name: str, coordinates: Sequence[str], progress: OnDownload | None) -> list[Path]:
    digest = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:12]
    done = cache_dir() / "jars" / f"{name}-{digest}"
    if not _is_whole(done):
        module = _module(coordinates)
        done.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir() / "jars.lock"):
            if not _is_whole(done):
                _drop_damaged(done, progress)
                _retrieve(name, module, done, progress)
    return sorted(done.glob("*.jar"))


def _is_whole(done: Path) -> bool:
    """Whether a set of jars exists, and none is truncated: the directory of a zip file is at its end."""
    jars = list(done.glob("*.jar"))
    return bool(jars) and all(zipfile.is_zipfile(jar) for jar in jars)


def _drop_damaged(done: Path, progress: OnDownload | None) -> None:
    """Delete a damaged set, its damaged jars in Ivy's cache, and the files of killed processes."""
    for jar in (*done.glob("*.jar"), *(cache_dir() / "ivy" / "cache").glob("**/*.jar")):
        if not zipfile.is_zipfile(jar):
            jar.unlink()
            if progress is not None:
                progress(f"{jar.name} again: it was damaged")
    shutil.rmtree(done, ignore_errors=True)
    for left in done.parent.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def kafka_broker(*, progress: OnDownload | None = None) -> list[Path]:
    """Return the class path of a Kafka broker."""
    return resolve("kafka", KAFKA_BROKER, progress=progress)


def cassandra(*, progress: OnDownload | None = None) -> list[Path]:
    """Return the class path of a Cassandra node."""
    return resolve("cassandra", CASSANDRA, progress=progress)


def _pyspark_jars() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _module(coordinates: Sequence[str]) -> str:
    """Ivy's description of a module that depends on `coordinates`."""
    lines = []
    for coordinate in coordinates:
        part = _COORDINATE.fullmatch(coordinate)
        if part is None:
            raise JarsUnavailable(f"{coordinate!r} is not a coordinate: write group:artifact:version")
        alone = ' transitive="false"' if part["alone"] else ""
        lines.append(
            f"<dependency org={quoteattr(part['org'])} name={quoteattr(part['name'])} rev={quoteattr(part['rev'])}"
            f' conf="default->default"{alone}/>'
        )
    return (
        '<ivy-module version="2.0"><info organisation="headwater" module="jars"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{"".join(lines)}</dependencies>'
        "</ivy-module>"
    )


def _retrieve(name: str, module: str, done: Path, progress: OnDownload | None) -> None:
    """Run Ivy, and rename the directory of its result to `done`."""
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=done.parent))
    try:
        description = work / "ivy.xml"
        description.write_text(module)
        jars = work / "jars"
        jars.mkdir()
        _ivy(description, jars, name, progress)
        jars.rename(done)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _ivy(description: Path, into: Path, name: str, progress: OnDownload | None) -> None:
    ivy = next(_pyspark_jars().glob("ivy-*.jar"), None)
    if ivy is None:
        raise JarsUnavailable("this PySpark contains no Ivy jar: install the package pyspark with pip")
    home = cache_dir() / "ivy"
    command = [java(), f"-Divy.default.ivy.user.dir={home}", "-jar", str(ivy), "-ivy", str(description)]
    if settings := os.environ.get("HEADWATER_IVY_SETTINGS"):
        command += ["-settings", settings]
    # Artifacts of one name differ in their classifier (netty's native parts), so the pattern contains it.
    command += ["-cache", str(home / "cache"), "-confs", "default", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{into}/[artifact]-[revision](-[classifier]).[ext]"]
    tail: deque[str] = deque(maxlen=200)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            tail.append(line.strip())
            if progress is not None and (found := _DOWNLOADING.search(line)):
                progress(found[1])
    if any("No space left on device" in line for line in tail):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if run.returncode != 0 or not any(into.iterdir()):
        raise JarsUnavailable(
            f"the jars of {name} could not be resolved ({_cause(tail)}): check that Maven Central can be reached, name "
            "a mirror in an Ivy settings file by HEADWATER_IVY_SETTINGS, or copy the cache directory "
            f"{cache_dir()} from a machine that has them"
        )


def _cause(tail: Sequence[str]) -> str:
    """The lines of Ivy's output that name what is missing."""
    said = [
        line.strip(": ") for line in tail if re.search(r"\S#\S.*not found|FAILED DOWNLOAD|Exception|\[FAILED", line)
    ]
    return "; ".join(dict.fromkeys(said[-3:])) or "Ivy gave no reason"
