"""How a record comes back from the dead-letter topic: two pass-through hops, and the name of the last one.

The record was rejected at node B and is stored in the dead-letter topic at D. A redriven record is B's bytes with the
hops B and D appended, both pass-through, so its lineage equals the original one. The name of the last hop says which
application rejected it and where it resumes:

    headwater.redrive@fleet             flow or republisher `fleet` rejected it, at its first stage; it left a hole
    headwater.redrive@fleet/carrier     the same, at stage `carrier`; the stages before it already hold it
    headwater.redrive@fleet/carrier!    the same, without a hole: no key was known, or it was `unproven`
    headwater.redrive@fleet/carrier!+   the same, and the operator asserts that it was never folded there
    headwater.redrive@fleet:2           generation 2 of flow `fleet` rejected it

A dead letter belongs to the application that rejected the record. Every other consumer of the topic has read the
original record, so it treats the redriven record as a copy.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from envelope.message import Hop

VIA = "headwater.redrive"
HEALED = "headwater.healed"
"""Name of a pass-through hop before a hop: the event was a dead letter upstream and was folded there late, so a
downstream consumer has not received it before, whatever its histories hold."""
LATE = "headwater.late"
"""The same, but nothing proves that the downstream consumer has not received it before."""

_NAME = re.compile(rf"{re.escape(VIA)}(?:@([^/:!+]*)(?::([1-9][0-9]{{0,8}}))?)?(?:/([^!+]*))?(!)?(\+)?\Z")


class Redrive(NamedTuple):
    """The facts about a redriven record in the name of its last hop.

    Attributes:
        stage: Stage to enter at; empty for the first.
        hole: It left a hole in its state.
        application: Flow or republisher that rejected it; empty when unknown.
        asserted: The operator asserts that it was never folded at that stage.
        generation: Generation of the flow that rejected it.
    """

    stage: str = ""
    hole: bool = True
    application: str = ""
    asserted: bool = False
    generation: int = 1

    @property
    def via(self) -> str:
        """Name of the hop that carries these facts."""
        return "".join(
            (
                VIA,
                f"@{quote(self.application, safe='')}" if self.application else "",
                f":{self.generation}" if self.application and self.generation > 1 else "",
                f"/{self.stage}" if self.stage else "",
                "" if self.hole else "!",
                "+" if self.asserted else "",
            )
        )


def read_via(via: str) -> Redrive | None:
    """Parse the name of a hop; None when it is not a redrive hop."""
    if not via.startswith(VIA) or (found := _NAME.match(via)) is None:
        return None
    application, generation, stage, no_hole, asserted = found.groups()
    return Redrive(stage or "", not no_hole, unquote(application or ""), bool(asserted), int(generation or 1))


def redrive_hops(died: Hop, letter: Hop, redrive: Redrive) -> tuple[Hop, Hop]:
    """The hops to append to the chain of a record that is redriven.

    Args:
        died: Coordinates at which it was rejected.
        letter: Coordinates of the dead letter.
        redrive: Where it resumes.
    """
    return (
        Hop(
            died.topic,
            died.partition,
            died.offset,
            via=VIA,
            pass_through=True,
            topic_id=died.topic_id,
            timestamp_ms=died.timestamp_ms,
        ),
        Hop(
            letter.topic, letter.partition, letter.offset, via=redrive.via, pass_through=True, topic_id=letter.topic_id
        ),
    )
