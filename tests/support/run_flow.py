"""Runs a flow in a separate process, for tests that kill it; see `runs.Run`."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyspark import SparkContext

from aggregations.spark import run_flow
from persistence.commit.faults import SPEC
from persistence.kafka import KafkaSettings
from tests.support import flows
from tests.support.options import called
from tests.support.progress import say


def main(flow: str, arguments: Sequence[Any], kafka: str, *, freeze: bool = False, **options: Any) -> None:
    """Run until caught up; say `batch` after each one.

    Args:
        flow: Name of the function that makes the flow.
        arguments: What it is called with.
        kafka: Broker address.
        freeze: Stop it and its children, with SIGSTOP, after each batch.
        options: More arguments of `run_flow`.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        _end_what_is_left()
    called(
        *(run_flow, getattr(flows, flow)(*arguments)),
        kafka=KafkaSettings(kafka),
        until_caught_up=True,
        # Workers of an existing JVM do not have this process's environment.
        conf={f"spark.executorEnv.{SPEC}": os.environ.get(SPEC, "")},
        progress=partial(say, freeze=freeze),
        **options,
    )


def _end_what_is_left() -> None:
    """Stop the context that a killed driver left in the JVM, with its tasks and its workers."""
    SparkContext._ensure_initialized()
    assert SparkContext._jvm is not None
    left = getattr(getattr(SparkContext._jvm.org.apache.spark, "SparkContext$"), "MODULE$").getActive()
    if left.isDefined():
        left.get().stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    main(**json.loads(sys.argv[1]))
