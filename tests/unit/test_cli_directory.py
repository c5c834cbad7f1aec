"""`headwater.toml`: what the commands of one directory use."""

from pathlib import Path

import pytest

from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from jobs import settings
from jobs.cli.errors import Exit
from jobs.demo.flow import flow
from jobs.directory import Directory, DirectoryError
from jobs.environment import UsageError
from tests.support.cli import run

WHOLE = """
store = "redis://every:6379"

[kafka]
bootstrap = "file:9092"

[flows.other]
generation = 7

[flows.flights]
generation = 2
dead_letters = "flights.dead"
stores.carrier = "sqlite://carrier.db?synchronous=normal"
"""


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of an otherwise empty directory, and nothing in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWATER_STORE", "HEADWATER_KAFKA_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "headwater.toml"
    path.write_text(WHOLE)
    return path


def test_it_binds_a_flow_s_stores_its_generation_its_dead_letters_and_kafka() -> None:
    found = settings.of_flow(flow)
    assert found.stores == {"aircraft": "redis://every:6379", "carrier": "sqlite://carrier.db?synchronous=normal"}
    assert (found.generation, found.dead_letters) == (2, "flights.dead")
    assert set(found.origins.values()) == {"headwater.toml"}
    assert settings.kafka().bootstrap == "file:9092"


def test_a_flow_s_own_store_wins_over_the_one_of_all_flows(file: Path) -> None:
    file.write_text('store = "sqlite://a.db"\n[flows.flights]\nstore = "sqlite://b.db"\n')
    assert set(settings.of_flow(flow).stores.values()) == {"sqlite://b.db"}


def test_command_line_and_environment_win_over_it() -> None:
    found = settings.of_flow(
        flow,
        ["carrier=sqlite://given.db"],
        dead_letters="given.dead",
        generation=5,
        env={"HEADWATER_STORE": "redis://e"},
    )
    assert found.lines() == [
        "store of aircraft: redis://e (HEADWATER_STORE)",
        "store of carrier: sqlite://given.db (--store)",
        "generation: 5 (--generation)",
        "dead letters: given.dead (--dead-letters)",
    ]


def test_a_journal_of_a_share_of_the_events_is_a_setting_of_a_flow(file: Path) -> None:
    file.write_text('[flows.flights]\njournal = "notes"\njournal_share = 0.25\n')
    assert settings.of_flow(flow).journal_share == 0.25
    assert settings.of_flow(flow).lines()[-2:] == [
        "journal: notes (headwater.toml)",
        "journal's share of events: 0.25 (headwater.toml)",
    ]
    assert settings.of_flow(flow, journal_share=0.5).journal_share == 0.5
    assert settings.of_flow(flow, journal_share=0.0).journal_share == 0.0, "refused by the run"


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "nan"])
def test_a_share_that_is_none_is_refused_before_anything_starts(
    share: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run --runner local", "submit-command"):
        words = [*command.split(), "jobs.demo.flow:flow", "--journal", "notes", "--journal-share", share]
        assert run(monkeypatch, *words) == Exit.USAGE
        assert f"--journal-share {share}: give a share of the events" in capsys.readouterr().err


def test_describe_says_what_the_commands_use_and_who_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "describe", "jobs.demo.flow:flow") == 0
    assert capsys.readouterr().err.splitlines() == [
        "store of aircraft: redis://every:6379 (headwater.toml)",
        "store of carrier: sqlite://carrier.db?synchronous=... (headwater.toml)",
        "generation: 2 (headwater.toml)",
        "dead letters: flights.dead (headwater.toml)",
    ]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("store = \n", 1, "Invalid value"),
        ('\nstores = "redis://r"\n', 2, "unknown setting 'stores'; choose from store, kafka, flows"),
        ("[flows.flights]\ngeneration = true\n", 2, "'generation' must be an integer"),
        (
            "[flows.other]\ngeneration = 1\n[flows.flights]\ngeneration = 0\n",
            4,
            "a generation is a number from 1 to 999999999",
        ),
        ('[flows.flights]\nstore = "here"\n', 2, "'store' is not the URL of a store: write for example"),
        ('[flows.flights]\nstore = "redis://[::1"\n', 2, "'store' is not the URL of a store"),
        ('\n[flows.flights.stores]\ncarrier = "redis://u:geheim@r"\n', 3, "has a password: name a file"),
        ("flows = 3\n", 1, "'flows' must be a table"),
        ("[flows.flights]\njournal_share = 1\n", 2, "'journal_share' must be a decimal number"),
        ("[flows.flights]\njournal_share = 1.5\n", 2, "a share of events is above 0 and at most 1.0"),
    ],
)
def test_an_error_in_it_names_file_and_line_and_never_a_value(text: str, line: int, said: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(DirectoryError) as refused:
        Directory.load()
    assert "headwater.toml" in str(refused.value)
    assert f"line {line}" in str(refused.value)
    assert said in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_a_stage_that_the_flow_does_not_have_is_refused(file: Path) -> None:
    file.write_text('[flows.flights.stores]\npilot = "redis://r"\n')
    with pytest.raises(UsageError, match=r"headwater.toml: flow 'flights' has no stage 'pilot'"):
        settings.of_flow(flow)


def test_a_command_that_needs_kafka_and_stores_reads_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path, *_: str, **__: str) -> str:
        read.append(path)
        return path.read_bytes().decode()

    def planned(_flow: object, options: RunOptions, **_: object) -> None:
        assert (options.broker.bootstrap, options.generation) == ("file:9092", 2)
        raise RunRefusedError("seen")

    monkeypatch.setattr(Path, "read_text", counted)
    monkeypatch.setattr("aggregations.spark.checks.plan_flow", planned)
    assert run(monkeypatch, "plan", "jobs.demo.flow:flow") == Exit.REFUSED
    assert [path.name for path in read].count("headwater.toml") == 1
