"""The flow as a query of Spark Structured Streaming, in a Spark application of your own.

spark-submit --py-files shop.py job.py     folds what is in the topic, and ends
"""

import os

from pyspark.sql import SparkSession

from jobs import kafka

from shop import flow

STORE = os.environ.get("HEADWATER_STORE", "lmdb://.headwater/states")


def main() -> None:
    """Fold what is in the topic. Without the trigger, the query runs until it is stopped."""
    spark = SparkSession.builder.appName("shop").getOrCreate()
    with flow.aggregator(stores=STORE, kafka=kafka(), dead_letters="shop.dead") as aggregator:
        lines = aggregator.read_stream(spark)
        # Spark's own Kafka source, with --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0, or of your Spark:
        # options = {"kafka.bootstrap.servers": kafka().bootstrap, "subscribe": "shop.lines"}
        # options |= {"startingOffsets": "earliest", "kafka.isolation.level": "read_committed", "includeHeaders": "true"}
        # lines = spark.readStream.format("kafka").options(**options).load()
        folded = lines.writeStream.foreachBatch(aggregator).queryName("shop")
        folded = folded.option("checkpointLocation", ".headwater/checkpoint")
        folded.trigger(availableNow=True).start().awaitTermination()
        print(f"{aggregator.total.records:,} records folded")


if __name__ == "__main__":
    main()
