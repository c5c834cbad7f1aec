"""Writes states to a bucket that nobody else has written to since they were loaded, without a script.

A script copies each string that it is given or passes on. Redis's own transactions do not, and take a third of the
server's time. They are as safe: `WATCH` makes `EXEC` write nothing if the bucket's hash has changed, and whatever
writes states, or installs an epoch, changes it. In all other cases, and after every error, the script decides: it also
finds out what was written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from redis import exceptions as redis

from persistence.marks import Mark
from persistence.redis.nodes import LOST, Command, Conversation, Server
from persistence.redis.versions import point_of

_RUN_ID: Final = re.compile(rb"run_id:(\w{1,12})")


@dataclass(frozen=True, slots=True)
class Transaction:
    """States of one bucket, whose expected versions were loaded at a point of the bucket.

    Attributes:
        bucket: Name of the bucket's hash.
        states: Name of the hash of its states.
        stage: Name of their stage.
        epoch: Epoch of the run.
        known: The mark that the bucket is known to have reached.
        point: The point before the first transaction of the same save and bucket.
        save: A new id.
        downstream: Marks of the stages downstream; empty for none.
        added: Number of states that do not exist yet.
        contents: Makes the states: key, content, key, content, ...
        due_states: Name of the sorted set of the times at which states are due.
        dues: By key: the time at which a state is due.
    """

    bucket: bytes
    states: bytes
    stage: str
    epoch: int
    known: Mark
    point: bytes
    save: bytes
    downstream: bytes
    added: int
    contents: Callable[[], Sequence[bytes | int]]
    due_states: bytes
    dues: Mapping[bytes, int]

    def look(self) -> list[Command]:
        """The commands before the transaction; `next` reads their answers."""
        fields = (f"{name}:{self.stage}" for name in ("mark", "save", "states", "removed"))
        return [("WATCH", self.bucket, self.states), ("HMGET", self.bucket, "epoch", *fields), ("HLEN", self.states)]

    def next(self, point: bytes, life: str, found: Sequence[Any], there: int) -> Mark | None:
        """The mark after the transaction; None if the script must decide."""
        epoch, mark, save, states, removed = found
        if removed is not None and self.dues and min(self.dues.values()) <= int(removed):
            return None
        if epoch != b"%d" % self.epoch or point_of(mark, save) != point or int(states or 0) != there:
            return None
        stored = Mark.parse((mark or b"").decode())
        return stored.next(life) if stored.holds(self.known) else None

    def write(self, mark: Mark, there: int) -> list[Command]:
        """The transaction."""
        stage = self.stage
        fields = [f"mark:{stage}", str(mark), f"save:{stage}", self.save, f"states:{stage}", there + self.added]
        fields += [f"downstream:{stage}", self.downstream] if self.downstream else []
        dues = chain.from_iterable((due, key) for key, due in self.dues.items())
        return [
            ("MULTI",),
            ("HSET", self.states, *self.contents()),
            *([("ZADD", self.due_states, "GT", *dues)] if self.dues else []),
            ("HSET", self.bucket, *fields),
            ("EXEC",),
        ]


def written(node: Server, transactions: Sequence[Transaction | None], waits: Sequence[Command]) -> dict[int, bytes]:
    """Run transactions, in order.

    Args:
        node: The server.
        transactions: The transactions; None is left out.
        waits: Commands that wait for replicas and disks.

    Returns:
        By number, for each transaction that is written, and as far as `waits` demand: the mark of its bucket.
    """
    todo = {number: one for number, one in enumerate(transactions) if one is not None}
    if not todo:
        return {}
    marks: dict[int, bytes] = {}
    try:
        with node.conversation() as talk:
            _run(talk, todo, marks)
            if marks and waits and not _enough(talk, waits):
                return {}
    except (*LOST, redis.ResponseError):
        return {} if waits else marks
    return marks


def _run(talk: Conversation, todo: dict[int, Transaction], marks: dict[int, bytes]) -> None:
    numbers = list(todo)
    points: dict[bytes, bytes] = {}
    talk.send(("INFO", "server"), *todo[numbers[0]].look())
    found = _RUN_ID.search(talk.read())
    life = found[1].decode() if found else ""
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        one, more = todo[number], [] if following is None else todo[following].look()
        talk.read()
        fields, there = talk.read(), talk.read()
        mark = one.next(points.get(one.bucket, one.point), life, fields, there)
        if mark is None:
            talk.send(("UNWATCH",), *more)
            talk.read()
            continue
        commands = one.write(mark, there)
        talk.send(*commands, *more)
        for _ in commands[:-1]:
            talk.read()
        if (answers := talk.read()) is not None and not any(isinstance(one, Exception) for one in answers):
            text = str(mark).encode()
            marks[number], points[one.bucket] = text, point_of(text, one.save)


def _enough(talk: Conversation, waits: Sequence[Command]) -> bool:
    talk.send(*waits)
    answers = [talk.read() for _ in waits]
    return all(is_enough(*wanted_and_got(*one)) for one in zip(waits, answers, strict=True))


def wanted_and_got(wait: Command, reply: Any) -> tuple[Sequence[int], Sequence[int]]:
    """How many acknowledgements `WAIT` or `WAITAOF` asks for, and how many came."""
    return (wait[1:3], reply) if wait[0] == "WAITAOF" else (wait[1:2], [reply])


def is_enough(wanted: Sequence[int], got: Sequence[int]) -> bool:
    """Whether enough replicas and disks acknowledged."""
    return all(g >= w for g, w in zip(got, wanted, strict=True))
