"""How tests start Spark."""

from typing import Final

FAST: Final = {
    # The JVM of a test lives for a minute or two: what its second compiler and the check of Spark's own byte code
    # would gain is less than what they cost, more than half of a start.
    "spark.driver.extraJavaOptions": (
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
        "-XX:-BytecodeVerificationRemote"
    )
}
"""Settings for a short life."""
