"""Runs a flow without Spark in a separate process, for tests that kill it; see `runs.Run`."""

import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from aggregations.local import executor, run_local
from persistence.kafka import KafkaSettings
from tests.support import flows
from tests.support.options import called
from tests.support.progress import say


def main(
    flow: str, arguments: Sequence[Any], kafka: str, *, few: int | None = None, freeze: bool = False, **options: Any
) -> None:
    """Run until caught up; say `batch` after each one.

    Args:
        flow: Name of the function that makes the flow.
        arguments: What it is called with.
        kafka: Broker address.
        few: Largest batch that is folded message by message.
        freeze: Stop it, with SIGSTOP, after each batch.
        options: More arguments of `run_local`.
    """
    if few is not None:
        executor.FEW_RECORDS = few
    called(
        *(run_local, getattr(flows, flow)(*arguments)),
        kafka=KafkaSettings(kafka),
        **{"until_caught_up": True, **options},
        progress=partial(say, freeze=freeze),
    )
    assert not {"pyspark", "py4j"} & sys.modules.keys(), "it does not import Spark"


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    main(**json.loads(sys.argv[1]))
