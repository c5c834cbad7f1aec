"""The Java that Spark, Kafka and Cassandra run on."""

import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from jobs.environment import STACK_JAVA_OPTIONS

OLDEST: Final = 17
"""Spark 4, Kafka 4 and Cassandra 5 need it."""
ANY_PATH: Final = {"LC_ALL": "C.UTF-8"}
"""With this environment Java opens paths with any characters; otherwise only those of the user's locale."""


class JavaUnavailable(RuntimeError):
    """There is no Java, or it is too old; the text names the remedy."""


@cache
def java() -> str:
    """Return the java command of `JAVA_HOME`, or else of `PATH`, after a check of its version.

    Raises:
        JavaUnavailable: There is none, it does not start, or it is older than Java 17.
    """
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    remedy = f"install Java {OLDEST} or newer (Debian: openjdk-17-jre-headless), or set JAVA_HOME to one"
    if command is None or not Path(command).exists():
        where = f"JAVA_HOME={home}: no Java at {command}" if home else "no java on PATH"
        raise JavaUnavailable(f"{where}; {remedy}")
    try:
        answer = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaUnavailable(f"{command} does not start ({type(error).__name__}): {remedy}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)  # Java 8 calls itself 1.8
    if found is None or int(found[1]) < OLDEST:
        raise JavaUnavailable(
            f"{command} is Java {found[1]}: {remedy}" if found else f"{command} has an unknown version: {remedy}"
        )
    return command


def server_options() -> tuple[str, ...]:
    """Return the Java options in `HEADWATER_STACK_JAVA_OPTIONS`, for the servers of the local stack."""
    return tuple(shlex.split(os.environ.get(STACK_JAVA_OPTIONS, "")))
