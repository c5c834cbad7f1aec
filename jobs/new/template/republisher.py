"""The republisher: takes orders apart into order lines. JSON in, envelopes out.

headwater republish republisher:order_lines --from shop.orders --input json --to shop.lines --via order-lines
"""

import json
from collections.abc import Iterator

from jobs.republish import InputRecord, OutputRecord


def order_lines(record: InputRecord) -> Iterator[OutputRecord]:
    """One message for every line of an order, keyed by its product.

    The same order must give the same lines in the same order whenever it is read: their number tells them apart.
    An order that this function cannot read raises, and goes to the dead-letter topic.
    """
    order = record.data
    for line in order["lines"]:
        payload = {
            "customer": order["customer"],
            "product": line["product"],
            "pieces": line["pieces"],
            "cents": line["pieces"] * line["price_cents"],
        }
        yield OutputRecord(json.dumps(payload).encode(), key=line["product"].encode(), content_type="application/json")
