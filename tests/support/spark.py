"""How tests start Spark.

Run as a program, it starts Spark once, so that the archive of Spark's classes exists when tests start it many times.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pyspark.sql import SparkSession

from aggregations.spark.session import session

# The JVM of a test runs for a minute or two. The second compiler and the verification of Spark's byte code would take
# more than half of its start, and gain less.
JAVA_OPTIONS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote"
)
"""Java options for a short life."""
FAST: Final = {"spark.driver.extraJavaOptions": JAVA_OPTIONS}
"""The same as a Spark setting, where no archive of Spark's classes is used: it would not fit these options."""


def python_path(*directories: Path) -> str:
    """`PYTHONPATH` of a process that uses Spark: these directories, and after them the Spark that `make spark` names."""
    return os.pathsep.join([*map(str, directories), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Load the classes of a stream, and have the archive written as this program ends."""
    with session("classes") as context, TemporaryDirectory() as directory:
        stream = SparkSession(context).readStream.format("rate").load().writeStream
        query = stream.foreachBatch(lambda batch, _: None).option("checkpointLocation", directory)
        query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()
