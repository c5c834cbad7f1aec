"""How a record comes back from the dead-letter topic: two transparent hops, and what their name says.

The record died at node B and lies in the dead-letter topic at D. Redriven it is B's bytes with the hops B and D
appended, both transparent: its lineage reads as the original one. The name of the last hop says where it goes on:

    headwater.redrive            at the first stage; it left a hole under its key
    headwater.redrive/carrier    at the stage where it died; the stages before it hold it already
    headwater.redrive/carrier!   the same, and it left no hole: nobody knew its key
"""

from typing import NamedTuple

from envelope.message import Hop

VIA = "headwater.redrive"


class Redrive(NamedTuple):
    """What a redriven record says of itself.

    Attributes:
        stage: Stage to enter at; empty for the first.
        hole: It left a hole in its state.
    """

    stage: str = ""
    hole: bool = True

    def passed(self, stage: str) -> bool:
        """Whether a stage comes behind the one that it is redriven to. It never was there, and left no hole."""
        return self.stage not in ("", stage)

    @property
    def via(self) -> str:
        """Name of the hop that says so."""
        return f"{VIA}{'/' if self.stage else ''}{self.stage}{'' if self.hole else '!'}"


def read_via(via: str) -> Redrive | None:
    """What a hop's name says; None when it is no redrive's."""
    head, _, stage = via.partition("/")
    if head.rstrip("!") != VIA:
        return None
    return Redrive(stage.removesuffix("!"), not via.endswith("!"))


def redrive_hops(died: Hop, letter: Hop, redrive: Redrive) -> tuple[Hop, Hop]:
    """The hops to append to a dead record's chain.

    Args:
        died: Coordinates where it died.
        letter: Coordinates of the dead letter.
        redrive: Where it goes on.
    """
    return (
        Hop(died.topic, died.partition, died.offset, via=VIA, transparent=True, topic_id=died.topic_id),
        Hop(letter.topic, letter.partition, letter.offset, via=redrive.via, transparent=True, topic_id=letter.topic_id),
    )
