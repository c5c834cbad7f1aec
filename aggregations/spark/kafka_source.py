"""Spark's Kafka source of a flow's topic, and the consumer settings that it reads with."""

import json
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aggregations.definition.flow import Flow
from persistence.kafka import KafkaSettings

# Measured: 540-690 thousand records a second instead of 150-190 with the connector's defaults.
CONSUMER = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.receive.buffer.bytes": str(1 << 20),
    # At the end of the log a fetch waits this long for new records.
    "kafka.fetch.max.wait.ms": "50",
    "kafka.isolation.level": "read_committed",
}


def read_topic(
    spark: SparkSession, flow: Flow[Any], starts: Mapping[int, int], *, kafka: KafkaSettings, max_records: int
) -> DataFrame:
    """Read a flow's topic as a stream.

    Args:
        spark: The session.
        flow: The flow.
        starts: Offset that is read first, by partition.
        kafka: Settings of the Kafka cluster.
        max_records: Maximum number of records of one batch; 0 for no limit.

    Returns:
        The rows of Spark's Kafka connector; with headers if the flow needs them.
    """
    assert flow.topic is not None
    topic = flow.topic.name
    # If no order must be kept, Spark reads new partitions by itself.
    which = {"assign": json.dumps({topic: sorted(starts)})} if flow.publishes else {"subscribe": topic}
    reader = spark.readStream.format("kafka").options(
        **which,
        startingOffsets=json.dumps({topic: {str(one): offset for one, offset in starts.items()}}),
        failOnDataLoss="true",
        includeHeaders=str(not flow.is_columnar).lower(),
        **CONSUMER,
        **kafka.spark(),
    )
    if max_records:
        reader = reader.option("maxOffsetsPerTrigger", max_records)
    return reader.load()
