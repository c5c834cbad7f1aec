"""The flow: what was sold of every product, and what every customer bought.

headwater describe shop:flow
headwater run shop:flow --dead-letters shop.dead --until-caught-up
headwater inspect shop:flow --stage product
"""

from typing import Any

import polars as pl

from aggregations import Element, Fields, Flow, Json, Topic, count, maximum, total


class Purchases:
    """A fold in plain Python: cents spent, and pieces of each product. Use one where `Fields` has no word for it."""

    def zero(self) -> dict[str, Any]:
        """The state of a customer who has bought nothing. A state is what JSON can hold."""
        return {"cents": 0, "pieces": {}}

    def fold(self, state: dict[str, Any], line: Element[Any]) -> dict[str, Any]:
        """The state with one order line more."""
        product = line["product"]
        state["cents"] += line["cents"]
        state["pieces"][product] = state["pieces"].get(product, 0) + line["pieces"]
        return state

    def result(self, state: dict[str, Any]) -> dict[str, Any]:
        """What readers see: the state, with the product bought most."""
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
