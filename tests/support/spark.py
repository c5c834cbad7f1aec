"""How tests start Spark."""

from typing import Final

# The JVM of a test lives for a minute: what its second compiler would gain is less than what it costs.
FAST: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
