"""How tests start Spark."""

import os
from pathlib import Path
from typing import Final

# The JVM of a test runs for a minute or two. The second compiler and the verification of Spark's byte code would take
# more than half of its start, and gain less.
JAVA_OPTIONS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote"
)
"""Java options for a short life."""
FAST: Final = {"spark.driver.extraJavaOptions": JAVA_OPTIONS}
"""The same as a Spark setting, for programs without pytest."""


def python_path(*directories: Path) -> str:
    """`PYTHONPATH` of a process that uses Spark: these directories, and after them the Spark that `make spark` names."""
    return os.pathsep.join([*map(str, directories), *filter(None, [os.environ.get("PYTHONPATH")])])
