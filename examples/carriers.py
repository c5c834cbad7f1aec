"""SQL over the states of fleet.py: the carriers with the largest share of late legs.

python carriers.py [STORE]           with polars, in this process
python carriers.py [STORE] --spark   with Spark, where a task reads each part of the store
"""

import sys

import polars as pl
from fleet import flow

from aggregations import bind
from jobs import StatesSource, states

QUERY = """
    SELECT _key AS carrier, legs, round(100 * late / legs, 1) AS percent_late, worst
    FROM carrier WHERE legs >= 10 ORDER BY percent_late DESC, carrier LIMIT 5
"""


def with_polars(store: str) -> pl.DataFrame:
    """The query on one frame."""
    frame = states(flow, "carrier", bind(flow, {}, store)).frame()
    return pl.SQLContext(carrier=frame).execute(QUERY, eager=True)


def with_spark(store: str) -> pl.DataFrame:
    """The query in Spark, which reads the states itself."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("carriers").getOrCreate()
    spark.dataSource.register(StatesSource)
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW carrier USING headwater "
        f"OPTIONS (flow 'fleet:flow', stage 'carrier', store '{store}')"
    )
    return pl.DataFrame(pl.from_arrow(spark.sql(QUERY).toArrow()))


if __name__ == "__main__":
    stores = [one for one in sys.argv[1:] if one != "--spark"]
    query = with_spark if "--spark" in sys.argv else with_polars
    print(query(stores[0] if stores else "lmdb://.headwater/states"))
