"""An application of a user: Spark's own Kafka source in a session without any setting of ours, and a flow behind it."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from persistence.kafka import KafkaSettings
from tests.support import flows


def main(
    flow: str,
    arguments: Sequence[Any],
    kafka: str,
    stores: Mapping[str, str],
    dead_letters: str,
    checkpoint: str,
    jars: Sequence[str],
    most: int,
) -> None:
    """Run the query until it has read everything.

    Args:
        flow: Name of the function that makes the flow.
        arguments: What it is called with.
        kafka: Broker address.
        stores: URL of the store by stage name.
        dead_letters: Topic.
        checkpoint: Directory of Spark's checkpoint.
        jars: The connector.
        most: Records of a batch.
    """
    its = getattr(flows, flow)(*arguments)
    conf: dict[str, Any] = {"spark.jars": ",".join(jars), "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    rows = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka).option("includeHeaders", True)
    rows = rows.option("subscribe", ",".join(its.topics)).option("startingOffsets", "earliest")
    aggregator = its.aggregator(kafka=KafkaSettings(kafka), stores=stores, dead_letters=dead_letters)
    with aggregator:
        writer = rows.option("maxOffsetsPerTrigger", most).load().writeStream.foreachBatch(aggregator)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    main(**json.loads(sys.argv[1]))
