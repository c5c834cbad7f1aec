"""What a new fold of live states begins with: the stores of the live ones, opened read-only, and perhaps a snapshot."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError
from aggregations.run.begin import look
from aggregations.run.restore import SNAPSHOT_VERSIONS
from aggregations.run.run import Run
from jobs.backup import restore
from jobs.snapshot_places import Place
from persistence.manifest import Manifest


def look_at_live(flow: Flow[Any], stores: Mapping[str, str], generation: int | None) -> Run:
    """Open the stores of live states read-only.

    Args:
        flow: The flow, with the definition that made the states.
        stores: URL of the store by stage name.
        generation: Generation of the states; None for the live one.

    Raises:
        DefinitionChangedError: Another definition made them.
        RunRefusedError: The stores do not fit each other or the flow.
    """
    try:
        return look(flow, stores, generation=generation)
    except DefinitionChangedError as error:
        raise DefinitionChangedError(
            f"flow {flow.name}: the states were made by another definition of its stages. Fold them with the code that made "
            "them"
        ) from error


def restored(flow: Flow[Any], stores: Mapping[str, str], snapshot: Place | None, generation: int) -> Manifest | None:
    """Fill stores from a snapshot, and return its manifest; None without a snapshot."""
    if snapshot is None:
        return None
    restore(flow, snapshot, stores=stores, generation=generation, accept=[SNAPSHOT_VERSIONS])
    with closing(look(flow, stores, generation=generation)) as run:
        return run.manifest
