"""Records what a command calls; the commands with their options are in `command_table`."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aggregations.engine.options import RunOptions
from jobs import copying
from jobs.stack import StackState, process
from jobs.stack.state import ServerState
from tests.support.command_table import COMMANDS as OTHERS
from tests.support.command_table import ELSEWHERE as OTHERS_ELSEWHERE
from tests.support.command_table import NOW, STACK_KAFKA, Command, Option
from tests.support.command_table_backup import BACKUP
from tests.support.command_table_refolding import REFOLDING
from tests.support.command_table_replay import REPLAY, REPLAY_ELSEWHERE
from tests.support.command_table_stack import STACK

__all__ = ["COMMANDS", "ELSEWHERE", "IGNORED", "Calls", "Command", "Exact", "Option", "plant", "recorded_in"]

COMMANDS = OTHERS | BACKUP | REFOLDING | REPLAY | STACK
ELSEWHERE = OTHERS_ELSEWHERE | REPLAY_ELSEWHERE


SETTINGS_FILE = '[kafka]\nbootstrap = "file:9092"\n'


IGNORED = frozenset({"progress", "planned", "stop", "agreed", "runner"})
"""What a command makes itself: callbacks and events."""


@dataclass
class Calls:
    """What the callees of commands were given."""

    given: list[dict[str, Any]] = field(default_factory=list)

    def of(self, callee: Callable[..., Any], result: Any) -> Callable[..., Any]:
        """A callee that keeps its arguments by name, and those in `RunOptions` by theirs."""
        signature = inspect.signature(callee)

        def recorded(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named).arguments
            for parameter in signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    bound |= bound.pop(parameter.name, {})
            if isinstance(options := bound.get("options"), RunOptions):
                bound |= {one.name: getattr(options, one.name) for one in fields(bound.pop("options"))}
            self.given.append({name: one for name, one in bound.items() if name not in IGNORED})
            return result

        return recorded


def arguments_of(source: type) -> Callable[..., dict[str, Any]]:
    """Makes a source of a copy, which refuses what it refuses, and returns its kind and its arguments by name."""

    def made(*arguments: Any, **named: Any) -> dict[str, Any]:
        source(*arguments, **named)
        bound = inspect.signature(source).bind(*arguments, **named)
        bound.apply_defaults()
        return {"kind": source.__name__, **bound.arguments}

    return made


def recorded_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Commands run in an empty directory with a settings file and a local stack that runs, as far as can be seen."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWATER_KAFKA_BOOTSTRAP", "HEADWATER_KAFKA_BOOTSTRAP_SERVERS", "HEADWATER_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jobs.cli.republish._unread", lambda *_: 0)
    monkeypatch.setattr("jobs.cli.views.time", SimpleNamespace(time=lambda: float(NOW)))
    for source in (copying.TopicRecords, copying.FileLines, copying.QueryRows):
        monkeypatch.setattr(copying, source.__name__, arguments_of(source))
    (tmp_path / "kafka.toml").write_text(SETTINGS_FILE)
    (tmp_path / "local").mkdir()
    pid = os.getpid()
    kafka = ServerState("kafka", pid, process.start_of(pid) or "", STACK_KAFKA, "log")
    StackState(tmp_path / "local", (kafka,)).save()
    (tmp_path / ".headwater").mkdir()
    (tmp_path / ".headwater" / "stack").symlink_to(tmp_path / "empty")
    return Calls()


def plant(calls: Calls, command: Command, monkeypatch: pytest.MonkeyPatch, result: Any = None) -> None:
    module, _, name = command.callee.rpartition(".")
    callee = getattr(import_module(module), name)
    monkeypatch.setattr(command.callee, calls.of(callee, command.result if result is None else result))


class Exact:
    """A demo whose numbers were right, or not."""

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
