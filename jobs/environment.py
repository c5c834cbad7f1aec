"""Names of the environment variables that the command line reads; Kafka's settings have their own, `HEADWATER_KAFKA_*`."""

from typing import Final

DEBUG: Final = "HEADWATER_DEBUG"
"""Anything in it shows stack traces and more of the log."""
STORE: Final = "HEADWATER_STORE"
"""URL of the store of all stages; `--store` wins over it."""
SPARK_LOG_LEVEL: Final = "HEADWATER_SPARK_LOG_LEVEL"
"""How much Spark says: off (the default), error, warn, info."""
STACK_JAVA_OPTIONS: Final = "HEADWATER_STACK_JAVA_OPTIONS"
"""Java options of the local stack's servers."""
