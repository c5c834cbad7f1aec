"""How tests start Spark."""

from typing import Final

# The JVM of a test lives for a minute or two: what its second compiler and the check of Spark's own byte code would gain
# is less than what they cost, more than half of a start.
JAVA_OPTIONS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote"
)
"""Java options for a short life."""
FAST: Final = {"spark.driver.extraJavaOptions": JAVA_OPTIONS}
"""The same as a setting of Spark, for what runs without pytest."""
