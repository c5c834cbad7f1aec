"""Binds each stage of a flow to its store."""

from collections.abc import Mapping
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.errors import FlowError
from persistence.commit.order import store_order


def bind(flow: Flow[Any], stores: Mapping[str, str], default: str = "") -> dict[str, str]:
    """Return the URL of the store of every stage; under `end` that of a flow without a stage.

    Args:
        flow: The flow.
        stores: URL by stage name.
        default: URL for stages without a URL in `stores` or in the flow's definition.

    Raises:
        FlowError: A stage has no store, `stores` names a stage that does not exist, or an argument has the wrong type.
    """
    check_type("flow=", flow, Flow, "a Flow")
    check_type(
        "stores=", stores, Mapping, 'a mapping of stage names to URLs, such as {"orders": "sqlite:///orders.db"}'
    )
    for name, url in stores.items():
        if name not in flow.stage_names:
            flow.stage(name)
        check_type(f"the store of stage {name!r}", url, str, "a URL")
    check_type("default=", default, str, "a URL")
    defined = {stage.name: stage.aggregate.store for stage in flow.stages}
    bound = {name: stores.get(name) or defined.get(name) or default for name in flow.stage_names}
    missing = [name for name, url in bound.items() if not url]
    if missing:
        raise FlowError(
            f"no store for stage {', '.join(missing)}: give --store URL or --store {missing[0]}=URL; in Python, stores="
        )
    try:
        store_order(bound.values())
    except ValueError:  # its text contains the URLs, which may contain passwords
        raise FlowError(
            "the store of a stage appears again after another stage's store: bind adjacent stages to one store, "
            "or use a third one"
        ) from None
    return bound
