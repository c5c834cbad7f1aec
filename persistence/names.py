"""Identities in a store: one generation of a flow, and one stage of it."""

import re
from dataclasses import dataclass

# Names become parts of keys, tables and file names in every store, so they contain no separator and no space.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}\Z")
MAX_GENERATION = 999_999_999
"""The hop of a redriven record names a generation with up to nine digits (`envelope.redrive`)."""


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a stored key: 1 to 100 of `A-Z a-z 0-9 _ . -`.

    Raises:
        ValueError: It is invalid.
    """
    if not _NAME.match(name):
        raise ValueError(
            f"{name[:100]!r} is not a valid name of a {kind}: use 1 to 100 characters of A-Z a-z 0-9 _ . -"
        )
    return name


def check_generation(flow: str, generation: int) -> int:
    """Return `generation` if a flow can have states of this number.

    Raises:
        ValueError: It is not between 1 and `MAX_GENERATION`.
    """
    if not 1 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation {generation} of flow {flow}: generations count from 1 to {MAX_GENERATION}")
    return generation


@dataclass(frozen=True, slots=True)
class FlowRef:
    """One generation of a flow: a complete set of its states, with one epoch and one manifest a store.

    Attributes:
        flow: Name of the flow.
        generation: 1 for the first; a rebuild writes the next one. 0 contains no states of the flow, but the pointer to
            its live generation (`persistence.pointer`).
    """

    flow: str
    generation: int = 1

    def __post_init__(self) -> None:
        check_name("flow", self.flow)
        if self.generation:
            check_generation(self.flow, self.generation)

    def __str__(self) -> str:
        return f"flow {self.flow}, generation {self.generation}" if self.generation else f"flow {self.flow}"

    def stage(self, name: str) -> "StageRef":
        """Return the stage called `name`."""
        return StageRef(self.flow, self.generation, name)


@dataclass(frozen=True, slots=True)
class StageRef:
    """One stage of one generation of a flow: the name space of its states' keys."""

    flow: str
    generation: int
    stage: str

    def __post_init__(self) -> None:
        check_name("stage", self.stage)
        FlowRef(self.flow, self.generation)

    def __str__(self) -> str:
        return f"{self.flow_ref}, stage {self.stage}"

    @property
    def flow_ref(self) -> FlowRef:
        """The flow that the stage belongs to."""
        return FlowRef(self.flow, self.generation)
