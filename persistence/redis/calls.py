"""Sends calls to the servers that store their keys: pipelined, with bounded retries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import stamina
from redis import exceptions as redis

from persistence.commit.faults import effect
from persistence.errors import StoreError, Terminal
from persistence.names import FlowRef, StageRef
from persistence.redis.errors import Meaning, meaning_of
from persistence.redis.nodes import LOST, Command, Nodes, Read, Server
from persistence.redis.scripts import ALL, Script
from persistence.redis.settings import RedisSettings
from persistence.redis.transaction import Transaction, is_enough, wanted_and_got, written


@dataclass(frozen=True, slots=True)
class Call:
    """One command to the server that stores a key. It must be safe to send again.

    Attributes:
        key: Determines the server.
        command: Makes the command. A large one is made when it is sent: meanwhile the server executes others.
        read: Converts the answer as soon as it arrives; None to return it unchanged. It may be called several times.
        transaction: What does the same at less cost if it is possible; its mark is the answer then.
    """

    key: bytes
    command: Callable[[], Command]
    read: Read | None = None
    transaction: Transaction | None = None


def command_call(key: bytes, *command: Any, read: Read | None = None) -> Call:
    """The call of a command."""
    return Call(key, lambda: command, read)


def script_call(
    script: Script,
    keys: Sequence[bytes],
    arguments: Sequence[bytes | int] | Callable[[], Sequence[bytes | int]] = (),
    transaction: Transaction | None = None,
) -> Call:
    """The call of a script. All its keys are in one slot. It is safe to send again: the script checks what is stored.

    Args:
        script: The script.
        keys: Its keys.
        arguments: Its further arguments, or what makes them.
        transaction: What is tried before the script.
    """

    def command() -> Command:
        return ("EVALSHA", script.sha, len(keys), *keys, *(arguments() if callable(arguments) else arguments))

    return Call(keys[0], command, transaction=transaction)


class _AgainError(Exception):
    """Some calls are still unanswered."""

    def __init__(self, meaning: Meaning) -> None:
        super().__init__(meaning.what)
        self.meaning = meaning


class Caller:
    """Sends calls.

    A call whose answer was lost is sent again. This is how the store reads back: in one atomic step, the script
    finds whether the call took effect before, even if the first copy arrives after the second.
    """

    def __init__(self, nodes: Nodes, settings: RedisSettings) -> None:
        self._nodes = nodes
        self._settings = settings
        self._waits = _waits(settings)

    def run(
        self, calls: Sequence[Call], ref: FlowRef | StageRef, *, writes: bool = False, point: str = ""
    ) -> list[Any]:
        """Return the answers of the calls, in order.

        Args:
            calls: The calls; those to one server are sent together.
            ref: Flow or stage concerned, for errors.
            writes: Wait until the replicas and disks required by the settings have the writes.
            point: Fault point of each exchange with a server; empty for none.

        Raises:
            Transient: A call was not answered in time; it did or did not take effect.
            Terminal: A server refused a call, or the replicas or disks did not acknowledge.
            Corrupt: A key is of an unexpected type.
        """
        answers: dict[int, Any] = {}
        try:
            for attempt in stamina.retry_context(
                on=_AgainError,
                attempts=None,
                timeout=self._settings.retry_for,
                wait_initial=0.02,
                wait_max=1.0,
                wait_jitter=0.05,
            ):
                with attempt:
                    self._try(calls, answers, self._waits if writes else (), point)
        except _AgainError as error:
            raise _placed(error.meaning.error(self._settings.url), ref) from error.__cause__
        except StoreError as error:
            raise _placed(error, ref) from error.__cause__
        return [answers[i] for i in range(len(calls))]

    def _try(self, calls: Sequence[Call], answers: dict[int, Any], waits: Sequence[Command], point: str) -> None:
        """Run the calls that have no answer yet; raise if some are left."""
        left: Exception | Meaning | None = None
        try:
            todo = [(self._nodes.of(call.key), i) for i, call in enumerate(calls) if i not in answers]
        except (*LOST, redis.ResponseError) as error:
            self._again(error)
        todo.sort(key=lambda one: id(one[0]))
        for node, group in groupby(todo, key=lambda one: one[0]):
            places = [i for _, i in group]
            try:
                exchange = partial(_exchange, node, [calls[i] for i in places], waits)
                replies, short = effect(point, exchange) if point else exchange()
            except (*LOST, redis.ResponseError) as error:  # a connection may be refused by an answer, too
                left = error
                continue
            if short:
                left = short
                continue
            for i, reply in zip(places, replies, strict=True):
                if not isinstance(reply, redis.RedisError):
                    answers[i] = reply
                elif (meaning := meaning_of(reply)).again:
                    left = reply
                else:
                    raise meaning.error(self._settings.url)
        if left is not None:
            self._again(left)

    def _again(self, cause: Exception | Meaning) -> None:
        self._nodes.forget()
        if isinstance(cause, Meaning):
            raise _AgainError(cause)
        meaning = meaning_of(cause)
        if not meaning.again:
            raise meaning.error(self._settings.url) from None
        raise _AgainError(meaning) from cause


def _exchange(node: Server, calls: Sequence[Call], waits: Sequence[Command]) -> tuple[list[Any], Meaning | None]:
    """The answers, and an error if too few replicas or disks acknowledged."""
    answers: dict[int, Any] = dict(written(node, [call.transaction for call in calls], waits))
    left = [number for number in range(len(calls)) if number not in answers]
    if not left:
        return [answers[number] for number in range(len(calls))], None
    others = [calls[number] for number in left]
    got = _sent(node, others, waits)
    if any(isinstance(reply, redis.NoScriptError) for reply in got[: len(others)]):
        # These were not executed. The others were, and find that when they are sent again.
        node.exchange([("SCRIPT", "LOAD", script.text) for script in ALL])
        got = _sent(node, others, waits)
    answers.update(zip(left, got, strict=False))
    short = next(filter(None, map(_short, waits, got[len(others) :])), None)
    return [answers[number] for number in range(len(calls))], short


def _sent(node: Server, calls: Sequence[Call], waits: Sequence[Command]) -> list[Any]:
    return node.exchange(chain((call.command() for call in calls), waits), [call.read for call in calls])


def _waits(settings: RedisSettings) -> tuple[Command, ...]:
    milliseconds = int(settings.wait_timeout * 1000)
    waits: list[Command] = []
    if settings.wait:
        waits.append(("WAIT", settings.wait, milliseconds))
    if settings.waitaof:
        waits.append(("WAITAOF", *settings.waitaof, milliseconds))
    return tuple(waits)


def _short(wait: Command, reply: Any) -> Meaning | None:
    if isinstance(reply, redis.RedisError):
        return meaning_of(reply)
    wanted, got = wanted_and_got(wait, reply)
    if is_enough(wanted, got):
        return None
    return Meaning(
        f"the write was applied, but {wait[0]} returned {got} instead of {list(wanted)}: too few replicas or disks have it",
        "Check the replicas and the append-only file, then start the flow again",
        Terminal,
    )


def _placed(error: StoreError, ref: FlowRef | StageRef) -> StoreError:
    return type(error)(error.what, error.remedy, ref, error.key)


def chunks(sizes: Sequence[int], most: int, most_bytes: int) -> list[slice]:
    """Divide items of these sizes, in order, into slices of at most `most` items and about `most_bytes` bytes."""
    if most * max(sizes, default=0) <= most_bytes:
        return [slice(start, min(start + most, len(sizes))) for start in range(0, len(sizes), most)]
    runs, start, total, i = [], 0, 0, -1
    for i, size in enumerate(sizes):
        if i > start and (i - start >= most or total + size > most_bytes):
            runs.append(slice(start, i))
            start, total = i, 0
        total += size
    if i >= start:
        runs.append(slice(start, i + 1))
    return runs
