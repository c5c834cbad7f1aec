"""`headwater copy`: which source is meant, and what is refused before anything is asked of Kafka."""

import json
from pathlib import Path

import pytest

from jobs import settings
from jobs.environment import UsageError
from tests.support.cli import run

NAMED = ("copy", "--name", "c", "--to", "target", "--bootstrap", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give one source"),
        (("--from", "a", "--from-lines", "b"), "give one source"),
        (("--from", "a", "--key", "till"), "records of topics keep their keys"),
        (("--from-lines", "a", "--from-cluster", "west=b:1"), "--from-cluster is for topics"),
        (("--from", "a", "--from-cluster", "west"), "write NAME=HOST:PORT"),
        (("--from", "a", "--input", "yaml"), "unknown input format"),
        (("--from", "a", "--event-id", "coordinates"), "without an envelope"),
        (("--from", "a", "--input", "raw", "--event-id", "uuid"), "hash:NAME,NAME"),
        (("--from", "a", "--accept", "everything"), "unknown risk everything"),
        (("--from", "target"), "loop forever"),
        (("--from-lines", "a", "--input", "cloudevents"), "write raw or json"),
        (("--from-lines", "a", "--key", "till"), "the lines must be JSON"),
        (("--from-database", "sqlite:a"), "needs --query and --column"),
        (("--from-database", "sqlite:a", "--query", "SELECT 1", "--column", "a b"), "the name of a column"),
        (("--from-database", "json:__name__", "--query", "SELECT 1", "--column", "a"), "is not a function but a str"),
        (("--from-lines", "a", "--positions", "target"), "must differ"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *NAMED, *arguments, "--json") == 2
    out, err = capsys.readouterr()
    assert text in json.loads(out)["refused"]
    assert text in " ".join(err.split())


def test_another_cluster_is_given_by_address_or_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_KAFKA_SASL_USERNAME", "of the other cluster")
    file = tmp_path / "west.toml"
    file.write_text('[kafka]\nbootstrap = "b:2"\nsecurity.protocol = "SSL"\n')
    name, west = settings.other_cluster("west=a:1")
    assert west
    assert (name, west.bootstrap, west.options) == ("west", "a:1", {})
    name, west = settings.other_cluster(f"west={file}")
    assert west
    assert (name, west.bootstrap, west.options) == ("west", "b:2", {"security.protocol": "SSL"})
    assert settings.other_cluster(None) == ("", None)
    for text in ("west", "=a:1", "west="):
        with pytest.raises(UsageError, match="NAME=HOST:PORT"):
            settings.other_cluster(text)
