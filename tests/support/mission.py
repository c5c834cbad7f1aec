"""A chain of services for the test that kills all of them: two republishers and two flows.

orders -> by_customer -> customers -> by_item -> items -> sales -> sold -> demand
                                                    └-> articles (snapshots)
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from jobs.republish.record import InputRecord, OutputRecord

ORDERS: Final = "mission.orders"
"""JSON without an envelope, keyed by till: these records are the roots."""
CUSTOMERS: Final = "mission.customers"
ITEMS: Final = "mission.items"
SOLD: Final = "mission.sold"
ARTICLES: Final = "mission.articles"
PARTITIONS: Final = {ORDERS: 3, CUSTOMERS: 2, ITEMS: 3, SOLD: 2, ARTICLES: 2}


def by_customer(record: InputRecord) -> OutputRecord:
    """The unchanged order, keyed by its customer."""
    return OutputRecord(key=json.loads(record.payload)["customer"].encode())


def by_item(record: InputRecord) -> Iterator[OutputRecord]:
    """One message for each of the order's items, none to three."""
    order = json.loads(record.payload)
    for article, pieces in order["items"]:
        item = {"customer": order["customer"], "article": article, "pieces": pieces}
        yield OutputRecord(json.dumps(item).encode(), payload_type="item")


_ITEM = Json({"customer": str, "article": str, "pieces": int})
_TOTALS = Fields(items=count(), pieces=total("pieces"), most=maximum("pieces"))

sales: Final[Flow[Any]] = (
    Flow("sales")
    .source(Topic(ITEMS, _ITEM))
    .aggregate("customer", "customer", _TOTALS)
    .aggregate("article", "article", _TOTALS)
    .publish_states(ARTICLES)
    .publish(SOLD, key="article")
)

demand: Final[Flow[Any]] = Flow("demand").source(Topic(SOLD, _ITEM)).aggregate("demand", "article", _TOTALS)


def totals(orders: Iterable[dict[str, Any]], by: str) -> dict[bytes, dict[str, int]]:
    """The expected states for every customer or article, for orders without copies."""
    pieces: dict[bytes, list[int]] = defaultdict(list)
    for order in orders:
        for article, number in order["items"]:
            pieces[(article if by == "article" else order["customer"]).encode()].append(number)
    return {key: {"items": len(each), "pieces": sum(each), "most": max(each)} for key, each in pieces.items()}
