"""The republisher: splits orders into order lines. JSON in, envelopes out.

headwater republish republisher:order_lines --from shop.orders --input json --to shop.lines --via order-lines
"""

import json
from collections.abc import Iterator

from jobs.republish import InputRecord, OutputRecord


def order_lines(record: InputRecord) -> Iterator[OutputRecord]:
    """One message for every line of an order, keyed by its product.

    Reading an order again must give the same lines in the same sequence, since their numbers identify them.
    If this function raises, the order goes to the dead-letter topic.
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
