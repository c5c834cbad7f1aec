"""Reasons to refuse a run, each with a name: the run goes ahead only if that risk is accepted by name."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final

from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from persistence.compaction import COMPACTED_SOURCE
from persistence.findings import Finding
from persistence.growth import GROWN_UNDRAINED
from persistence.kafka.facts import BEYOND_END
from persistence.registry import risks


class Risk(StrEnum):
    """A reason to refuse a run; `--accept NAME` accepts the risk."""

    LOST_RECORDS = "lost-records"
    """Retention deleted records that the flow has not folded: they stay missing."""
    GAP = "gap"
    """A batch does not continue where the flow stands, or an archive lacks offsets: the records in between stay missing."""
    BEYOND_END = BEYOND_END
    """The log lost records that the flow has folded: the flow resumes with what was written in their place."""
    TOPIC_RECREATED = "topic-recreated"
    """The topic was deleted and created again: the new one is read from its beginning, into lanes of its own."""
    DOWNSTREAM_BEHIND = "downstream-behind"
    """A downstream store lost data that a replay does not restore: the data stays missing."""
    STORE_EMPTY = "store-empty"
    """A store contains nothing of the flow while another store does: the data of a downstream store stays missing, a
    store upstream of all others is filled again from the records that are still in the topic."""
    STAGE_ADDED = "stage-added"
    """A stage was added to a flow that has run before, or bound to another store: it lacks what was folded before."""
    STORE_WENT_BACK = "store-went-back"
    """A part of a store lost acknowledged writes, but its manifest did not go back: the data stays missing."""
    NOT_DURABLE = "not-durable"
    """A store acknowledges writes before they are safe: a crash of its server may lose states but keep later writes."""
    COMPACTED_SOURCE = COMPACTED_SOURCE
    """The source topic is compacted: records that Kafka deletes before they are read stay missing."""
    GROWN_UNDRAINED = GROWN_UNDRAINED
    """Partitions were added before the topic was read to its end: published messages of a key may be out of order."""
    GROWTH_FULL = "growth-full"
    """More positions of a key arrived while the topic grew than a lane keeps: messages below its floor are dropped."""
    NEWEST_ROWS = "newest-rows"
    """A rebuild of a flow with lookups: every record finds the newest rows, not those of when it was read first."""
    OTHER_BATCHES = "other-batches"
    """Another generation goes on in other batches: behind lookups and filters over all partitions it may publish other
    messages than those of the same events that are published."""
    DEFINITION = "definition"
    """The states were made by another definition: they are continued as if both definitions meant the same."""


LOSSES: Final = frozenset({Risk.DOWNSTREAM_BEHIND, Risk.STORE_EMPTY, Risk.STAGE_ADDED, Risk.STORE_WENT_BACK})
"""Risks of a store without, or no longer with, data that other stores rely on."""


def check_accept(flow: str, stores: Mapping[str, str], accept: Sequence[str]) -> None:
    """Check the names of accepted risks.

    Args:
        flow: Name of the flow.
        stores: URL of the store by stage name.
        accept: The names.

    Raises:
        FlowError: It is a text instead of a list, or neither a run nor one of the stores has such a risk.
    """
    if isinstance(accept, str):
        raise FlowError(f"accept= takes a list of risks, such as [{accept!r}]; got text")
    known = {*Risk, *(risk for url in stores.values() for risk in risks(url))}
    if unknown := sorted({*accept} - known):
        raise FlowError(f"flow {flow}: unknown risk {', '.join(unknown)}; choose from {', '.join(sorted(known))}")


def unsafe(risk: Risk, what: str, remedy: str) -> Finding:
    """A reason why a run is unsafe, and what to do about it."""
    return Finding(risk.value, what, remedy, unsafe=True)


def refuse(findings: Sequence[Finding], accept: Collection[str]) -> None:
    """Refuse a run unless the risk of every unsafe finding is accepted.

    Raises:
        RunRefusedError: A risk is not accepted; the text lists every such finding and the flag that accepts it.
    """
    left = [finding for finding in findings if finding.unsafe and finding.risk not in accept]
    if left:
        named = " ".join(f"--accept {risk}" for risk in dict.fromkeys(finding.risk for finding in left))
        changed = all(finding.risk == Risk.DEFINITION for finding in left)
        error = DefinitionChangedError if changed else RunRefusedError
        raise error(
            "; ".join(f"{one.what.removesuffix('.')}. {one.remedy.removesuffix('.')}" for one in left) + f" ({named})"
        )
