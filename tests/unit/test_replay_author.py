"""Who changes the pointer of a flow, and whose work on a rebuild may be continued."""

import os
import pwd
import socket

import pytest

from jobs.replaying.author import Author


def unknown(_number: int) -> None:
    raise KeyError


def test_a_user_without_a_name_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Author.here("why").by == f"{os.getuid()}@{socket.gethostname()}"


def test_only_a_process_of_this_machine_that_has_ended_may_be_followed() -> None:
    host, mine = socket.gethostname(), Author.here("why")
    assert mine.may_follow(f"{host}/4194305")
    for worker in (f"{host}/{os.getpid()}", f"{host}/1", "elsewhere/4194305", f"{host}/", "nonsense"):
        assert not mine.may_follow(worker)
