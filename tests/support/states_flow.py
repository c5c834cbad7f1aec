"""Flows whose states tests read by the name of this module."""

from aggregations import Element, Fields, Flow, Json, Topic, count, mean, session, total


class Cents:
    """Collects the cents of each sale."""

    def zero(self) -> dict[str, list[int]]:
        return {"cents": []}

    def fold(self, state: dict[str, list[int]], element: Element) -> dict[str, list[int]]:
        state["cents"].append(element.value["cents"])
        return state


_sales = Flow("shops").source(Topic("sales", Json({"shop": str, "cents": int}), envelope=False))

flow = _sales.aggregate(
    "shop", "shop", Fields(sales=count(), cents=total("cents"), price=mean("cents")), co_partitioned=False
)
own = _sales.aggregate("shop", "shop", Cents(), co_partitioned=False)
visits = _sales.aggregate("shop", "shop", Fields(sales=count()), co_partitioned=False, window=session("1h"))
