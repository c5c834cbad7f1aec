"""A process of its own that runs `fleet`, for tests that kill it: `python -m tests.support.run_fleet '{"topic": ...}'`."""

import json
import logging
import sys
from typing import Any

from aggregations.spark import run_flow
from jobs import jars
from persistence.kafka import KafkaSettings
from tests.support.flows import fleet
from tests.support.spark import FAST


def main(kafka: str, topic: str, path: Any, **options: Any) -> None:
    """Run until caught up; say `batch` after each one."""
    run_flow(
        fleet(topic, path),
        kafka=KafkaSettings(kafka),
        until_caught_up=True,
        jars=jars.kafka_connector(),
        conf=FAST,
        progress=lambda _: print("batch", flush=True),
        **options,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    main(**json.loads(sys.argv[1]))
