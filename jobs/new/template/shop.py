"""The flow: sales per product, and purchases per customer.

headwater describe shop:flow
headwater run shop:flow --dead-letters shop.dead --until-caught-up
headwater inspect shop:flow --stage product
"""

from typing import Any

import polars as pl

from aggregations import Element, Fields, Flow, Json, Topic, count, maximum, total


class Purchases:
    """A fold in plain Python, for aggregates that `Fields` does not offer: cents spent, and pieces of each product."""

    def zero(self) -> dict[str, Any]:
        """The state of a customer without purchases. A state may be any JSON value."""
        return {"cents": 0, "pieces": {}}

    def fold(self, state: dict[str, Any], line: Element[Any]) -> dict[str, Any]:
        """The state after one more order line."""
        product = line["product"]
        state["cents"] += line["cents"]
        state["pieces"][product] = state["pieces"].get(product, 0) + line["pieces"]
        return state

    def result(self, state: dict[str, Any]) -> dict[str, Any]:
        """The result for readers: the state and the product bought most."""
        pieces = state["pieces"]
        return {**state, "favourite": max(sorted(pieces), key=lambda product: pieces[product])}


flow = (
    Flow("shop")
    .source(Topic("shop.lines", payload=Json({"customer": str, "product": str, "pieces": int, "cents": int})))
    .filter(pl.col("pieces") > 0)
    .aggregate(
        "product",
        key="product",
        fold=Fields(lines=count(), pieces=total("pieces"), cents=total("cents"), largest=maximum("pieces")),
    )
    .aggregate("customer", key="customer", fold=Purchases())
)
