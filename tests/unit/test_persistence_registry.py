import sys

import pytest

from persistence import registry
from persistence.errors import Terminal
from persistence.memory import MemoryStore


def test_the_same_memory_name_is_the_same_store():
    assert registry.open_store("memory://one-name") is registry.open_store("memory://one-name")
    assert registry.open_store("memory://one-name") is not registry.open_store("memory://another")


def test_an_unknown_scheme_names_the_known_ones_and_no_password():
    with pytest.raises(Terminal, match=r"memory, .*sqlite") as caught:
        registry.open_store("mongodb://user:hunter2@host/db?authToken=hunter3")
    assert "hunter" not in str(caught.value)
    assert "mongodb://...@host/db" in str(caught.value)


def test_a_store_of_another_distribution_opens_by_its_dotted_path(monkeypatch):
    monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    registry.register("mine", "persistence.memory:open_store")
    assert isinstance(registry.open_store("mine://x"), MemoryStore)
    assert "mine" in registry.schemes()


def test_an_entry_point_is_found(monkeypatch, tmp_path):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headwater.stores]\ntheirs = persistence.memory:open_store\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert isinstance(registry.open_store("theirs://x"), MemoryStore)


def test_a_missing_driver_says_what_to_install(monkeypatch):
    monkeypatch.setitem(registry._targets, "mine", "no_such_driver_at_all:open_store")
    with pytest.raises(
        Terminal, match=r"no_such_driver_at_all.*Install the distribution that contains no_such_driver_at_all"
    ):
        registry.open_store("mine://x")
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "persistence.redis", raising=False)
    monkeypatch.setitem(sys.modules, "persistence.redis.store", None)
    with pytest.raises(Terminal, match=r"rediss://.*Install headwater again"):
        registry.open_store("rediss://x")


def test_a_store_without_a_preflight_finds_nothing():
    assert registry.preflight("memory://x") == []
