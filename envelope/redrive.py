"""How a record comes back from the dead-letter topic: two pass-through hops, and what their name says.

The record died at node B and lies in the dead-letter topic at D. Redriven it is B's bytes with the hops B and D
appended, both pass-through: its lineage reads as the original one. The name of the last hop says whose dead letter it
was and where it resumes:

    headwater.redrive@fleet             flow or republisher `fleet` gave it up, at its first stage; it left a hole
    headwater.redrive@fleet/carrier     the same, at stage `carrier`; the stages before it hold it already
    headwater.redrive@fleet/carrier!    the same, without a hole: no key was known, or it was `unproven`
    headwater.redrive@fleet/carrier!+   the same, and the operator asserts that it was never folded there
    headwater.redrive@fleet:2           generation 2 of flow `fleet` gave it up

A dead letter belongs to who gave the record up. Every other reader of the topic has read the record itself: to it the
redriven record is a copy.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from envelope.message import Hop

VIA = "headwater.redrive"
HEALED = "headwater.healed"
"""Name of a pass-through hop in front of a hop: the event was a dead letter upstream and was folded there late, so
whoever reads on has not had it, however far its histories are."""
LATE = "headwater.late"
"""The same where nothing proves that the reader has not had it."""

_NAME = re.compile(rf"{re.escape(VIA)}(?:@([^/:!+]*)(?::([1-9][0-9]{{0,8}}))?)?(?:/([^!+]*))?(!)?(\+)?\Z")


class Redrive(NamedTuple):
    """What a redriven record says of itself.

    Attributes:
        stage: Stage to enter at; empty for the first.
        hole: It left a hole in its state.
        application: Flow or republisher that gave it up; empty when unknown.
        asserted: The operator asserts that it was never folded at that stage.
        generation: Generation of the flow that gave it up.
    """

    stage: str = ""
    hole: bool = True
    application: str = ""
    asserted: bool = False
    generation: int = 1

    @property
    def via(self) -> str:
        """Name of the hop that says so."""
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
    """What a hop's name says; None when it is no redrive's."""
    if not via.startswith(VIA) or (found := _NAME.match(via)) is None:
        return None
    application, generation, stage, no_hole, asserted = found.groups()
    return Redrive(stage or "", not no_hole, unquote(application or ""), bool(asserted), int(generation or 1))


def redrive_hops(died: Hop, letter: Hop, redrive: Redrive) -> tuple[Hop, Hop]:
    """The hops to append to a dead record's chain.

    Args:
        died: Coordinates where it died.
        letter: Coordinates of the dead letter.
        redrive: Where it goes on.
    """
    return (
        Hop(died.topic, died.partition, died.offset, via=VIA, pass_through=True, topic_id=died.topic_id),
        Hop(
            letter.topic, letter.partition, letter.offset, via=redrive.via, pass_through=True, topic_id=letter.topic_id
        ),
    )
