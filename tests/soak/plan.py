"""Which disturbances there are and in which order: all of it follows from the seed and the number of kills."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from tests.soak.chain import DRIVER, REPUBLISHERS

_AT_ONCE = 4
"""Disturbances of one round, on average."""


class Step(NamedTuple):
    """One disturbance: what is done, to whom."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


def amounts(kills: int, servers: Sequence[str], *, clock: bool) -> dict[Step, int]:
    """How often each disturbance is wanted, for so many kills of services; the slow ones only from 50 kills on."""
    servers, services = list(dict.fromkeys(servers)), (DRIVER, *REPUBLISHERS)
    third, few = max(3 * kills // 10, 1), kills // 50
    wanted = {
        Step("kill", DRIVER): kills - kills // 2,
        **_shared("kill", REPUBLISHERS, kills // 2),
        Step("zombie", DRIVER): third - third // 2,
        **_shared("zombie", REPUBLISHERS, third // 2),
        **{Step("cut", server): max(third // 3, 1) for server in servers},
        **{Step("fill", server): few for server in servers},
        **{Step(kind, server): third for kind in ("kill", "freeze") for server in servers},
        **{Step("grow", topic): 1 for topic in ("orders", "customers", "items")},
        **{Step("recreate", topic): min(few, 1) for topic in ("orders", "customers", "items")},
    }
    if clock:
        wanted |= {Step("clock", target): few for target in (*services, *servers)}
    return {step: count for step, count in wanted.items() if count}


def rounds(seed: int, wanted: dict[Step, int]) -> list[list[Step]]:
    """Spread the disturbances over rounds: a target has at most one in a round, a topic is created again in a quiet one."""
    rng = random.Random(f"plan {seed}")
    by_target: dict[str, list[Step]] = {}
    alone: list[Step] = []
    for step, count in wanted.items():
        (alone if step.kind == "recreate" else by_target.setdefault(step.target, [])).extend([step] * count)
    busy = sum(map(len, by_target.values()))
    number = max(-(-busy // _AT_ONCE), *(len(steps) for steps in by_target.values()))
    made: list[list[Step]] = [[] for _ in range(number)]
    for steps in by_target.values():
        rng.shuffle(steps)
        for place, step in zip(sorted(rng.sample(range(number), len(steps))), steps, strict=True):
            made[place].append(step)
    for step in alone:
        made.insert(rng.randrange(1, len(made) + 1), [step])
    return made


def _shared(kind: str, targets: Sequence[str], count: int) -> dict[Step, int]:
    """As many for each target; the first ones get what is left over."""
    return {
        Step(kind, target): count // len(targets) + (place < count % len(targets))
        for place, target in enumerate(targets)
    }
