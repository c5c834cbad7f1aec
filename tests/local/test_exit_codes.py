"""One rule for all commands: 2 if a command line cannot be used, 3 if it can, and what it names is not there."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.local import run_local
from jobs.cli.errors import Exit
from jobs.environment import STORE
from tests.messages import Leg
from tests.support.cli import run as headwater
from tests.support.flows import fleet
from tests.support.world import World, alone

FLOW = "stocked:flow"
READING = ("blame FLOW", "explain FLOW --event-id e1", "audit FLOW", "rehearse FLOW --against stocked:other")
RANGES = {
    "reversed offsets": ("LEGS:0:3-1", "reversed; write LEGS:0:1-3"),
    "reversed times": ("2026-11-24T07:00:00Z/2026-11-24T06:00:00Z", "reversed; write 2026-11-24T06:00:00Z/"),
    "past the end": ("LEGS:0:900-901", "LEGS:0 ends before offset"),
    "unknown topic": ("trips", "the flow reads LEGS"),
    "unknown partition": ("LEGS:7", "LEGS has partitions 0 to 1"),
}
MALFORMED = ("LEGS:0:a-b", "yesterday/today")
STAGED = ("inspect FLOW", "audit FLOW", "rehearse FLOW --against stocked:other", "discard FLOW --from DEAD")
REPLAYING = ("--apply --reason why", "--swap --reason why", "--rollback --reason why", "--abandon --reason why")

REFUSED = {
    **{
        f"{command}: {name}": (f"{command} --range {text}", said)
        for command in READING
        for name, (text, said) in RANGES.items()
        if not command.startswith("audit")  # it has no ranges
    },
    **{f"{command}: unknown stage": (f"{command} --stage pilot", "pilot") for command in STAGED},
    "redrive: unknown stage": ("redrive --from DEAD --stage pilot", "--stage pilot: no dead letter is of it; choose"),
    "redrive: unknown topic of records": (
        "redrive --from DEAD --topic trips",
        "--topic trips: no dead letter is of it",
    ),
    "redrive: unknown application": ("redrive --from DEAD --application x", "--application x: no dead letter is of it"),
    "redrive: unknown stage among others": (
        "redrive --from DEAD --stage aircraft --stage pilot --apply",
        "--stage pilot",
    ),
    "discard: unknown topic of records": ("discard FLOW --from DEAD --topic trips", "--topic trips: no dead letter"),
    "redrive: unknown topic": ("redrive --from never-was", "never-was"),
    "discard: unknown topic": ("discard FLOW --from never-was", "never-was"),
    "inspect: unknown key": ("inspect FLOW --stage carrier --key XX", "no state for 1 of 1 key"),
    "inspect: unknown generation": ("inspect FLOW --stage carrier --generation 7", "no states"),
    "audit: unknown key": ("audit FLOW --stage carrier --key XX", "no state of key XX"),
    "audit: unknown generation": ("audit FLOW --generation 7", "generation 7"),
    "rehearse: unknown key": ("rehearse FLOW --against stocked:other --stage carrier --key XX", "no state of key XX"),
    "replay: unknown key": ("replay FLOW --stage carrier --key XX", "XX"),
    "replay: unknown stage": ("replay FLOW --stage pilot --key XX", "pilot"),
    "replay: redefined": ("replay stocked:other", "--redefine"),
    "replay: nothing to swap": (f"replay FLOW {REPLAYING[1]}", "no generation is being rebuilt"),
    "replay: nothing to roll back to": (f"replay FLOW {REPLAYING[2]}", "no earlier generation"),
    "replay: nothing to abandon": (f"replay FLOW {REPLAYING[3]}", "no generation is being rebuilt"),
    "replay: the live generation dropped": ("replay FLOW --drop 1 --reason why", "it is live"),
    "replay: an unknown generation dropped": ("replay FLOW --drop 7 --reason why", "contain nothing of it"),
    "explain: past the end": ("explain FLOW LEGS:0:900", "LEGS:0:900"),
    "explain: unknown partition": ("explain FLOW LEGS:7:0", "LEGS:7:0"),
    "explain: unknown event id": ("explain FLOW --event-id nobody", "no record with event id nobody in LEGS"),
    "explain: unknown topic": ("explain FLOW never-was:0:1", "no record with never-was:0:1 in its chain"),
    "explain: unknown journal": ("explain FLOW LEGS:0:0 --journal never-was", "never-was"),
    "explain: unknown dead letters": ("explain FLOW LEGS:0:0 --dead-letters never-was", "never-was"),
    "trace: past the end": ("trace LEGS:0:900", "LEGS:0:900"),
    "trace: unknown partition": ("trace LEGS:7:0", "LEGS:7:0"),
    "trace: unknown topic": ("trace never-was:0:0", "never-was:0:0"),
    **{
        f"{command}: the flow's topic does not exist": (command, "topic never-was: ")
        for command in (
            "plan stocked:nowhere",
            "blame stocked:nowhere",
            "explain stocked:nowhere --event-id e1",
            "rehearse stocked:nowhere --against FLOW",
            "rehearse FLOW --against stocked:nowhere",
        )
    },
    "plan: unknown dead letters": ("plan FLOW --dead-letters never-was", "topic never-was: "),
    "plan: unknown target": ("plan stocked:published", "Create the topic, or correct its name"),
}
UNUSABLE = {
    **{f"{command}: malformed {text}": f"{command} --range {text}" for command in READING for text in MALFORMED},
    **{
        f"{command}: {text}": f"{command} {text}"
        for command in ("explain FLOW", "trace")
        for text in ("LEGS:0", "LEGS:0:x", "0:1", ":0:1")
    },
    **{
        f"{command}: unknown option": f"{command} --no-such-option"
        for command in (
            *READING,
            *STAGED,
            "replay FLOW",
            "trace LEGS:0:0",
            "redrive --from DEAD",
            "snapshot FLOW --to x",
        )
    },
    **{
        f"{command}: unknown flow": f"{command.replace('FLOW', 'nowhere:flow')}"
        for command in (*READING, *STAGED, "replay FLOW", "explain FLOW LEGS:0:0", "snapshot FLOW --to x", "plan FLOW")
    },
    "inspect: which stage": "inspect FLOW",
    "replay: two actions": "replay FLOW --apply --swap --reason why",
    "replay: no reason": "replay FLOW --apply",
    "explain: two selections": "explain FLOW LEGS:0:0 --event-id e1",
}


@pytest.fixture(scope="module")
def stocked(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two records of a flow that were folded, and a dead letter."""
    from jobs.stack import topics

    directory = tmp_path_factory.mktemp("stocked")
    for name in ("codes-legs", "codes-dead"):
        topics.create(kafka, name, 2 if name.endswith("legs") else 1)
    made = World(kafka, "codes-legs", "codes-dead", directory, runner=run_local)
    with closing(made) as world:
        flow = fleet(world.topic, "messages")
        carriers = ("UA", "DL", "broken")
        world.send(alone(Leg(tail="N1", carrier=carrier, minutes=5), partition=0) for carrier in carriers)
        world.run(flow)
        flows = {
            "flow": f"fleet({world.topic!r}, 'messages')",
            "other": f"fleet({world.topic!r})",
            "nowhere": "fleet('never-was', 'messages')",
            "published": "flow.publish('never-was')",
        }
        lines = ("from tests.support.flows import fleet", *(f"{name} = {made}" for name, made in flows.items()))
        (directory / "stocked.py").write_text("\n".join(lines))
        yield world


@pytest.fixture
def command(stocked: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Runs a command in the directory of the flow."""
    monkeypatch.chdir(stocked.directory)
    monkeypatch.syspath_prepend(stocked.directory)
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP", stocked.settings.bootstrap)
    monkeypatch.setenv(STORE, stocked.stores(fleet(stocked.topic))["aircraft"])
    return lambda words: headwater(monkeypatch, *named(words, stocked).split())


def named(text: str, world: World) -> str:
    return text.replace("FLOW", FLOW).replace("LEGS", world.topic).replace("DEAD", world.dead)


def kept(world: World) -> object:
    """Everything that a command could change."""
    flow = fleet(world.topic, "messages")
    return world.untimed(flow), world.manifest(flow), world.topics.ends([world.topic, world.dead])


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_refused_with_three_in_one_line_and_nothing_is_done(
    words: str, said: str, stocked: World, command: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = kept(stocked)
    assert command(f"{words} --json") == Exit.REFUSED
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("headwater: ")]
    assert named(said, stocked) in line
    assert json.loads(out.splitlines()[-1]) == {"refused": line.removeprefix("headwater: ")}
    assert kept(stocked) == before


@pytest.mark.parametrize("words", UNUSABLE.values(), ids=UNUSABLE)
def test_a_command_line_that_cannot_be_used_ends_with_two_and_nothing_is_done(
    words: str, stocked: World, command: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = kept(stocked)
    assert command(words) == Exit.USAGE
    assert capsys.readouterr().err
    assert kept(stocked) == before


MISTYPED = {
    "inspect FLOW --stage carrier": (Exit.REFUSED, "no states: if the flow ran with another store, give --store"),
    "inspect FLOW --stage carrier --key UA": (Exit.REFUSED, "no state for 1 of 1 key"),
    "explain FLOW LEGS:0:0": (Exit.DONE, "it never ran, or with others"),
    "audit FLOW": (Exit.REFUSED, "the stores contain nothing of it"),
    "snapshot FLOW --to x": (Exit.REFUSED, ""),
    "replay FLOW": (Exit.REFUSED, "the stores contain nothing of it; if it ran with other stores, give --store"),
    "replay FLOW --apply --reason why": (Exit.REFUSED, "the stores contain nothing of it"),
    **{f"replay FLOW {form}": (Exit.REFUSED, "") for form in REPLAYING[1:]},
    "replay FLOW --drop 1 --reason why": (Exit.REFUSED, ""),
    "replay FLOW --stage carrier --key UA --apply --reason why": (Exit.REFUSED, ""),
    "discard FLOW --from DEAD": (Exit.REFUSED, "the stores contain nothing of it; if it ran with other stores, give"),
    "discard FLOW --from DEAD --apply": (Exit.REFUSED, "the stores contain nothing of it"),
    "plan FLOW": (Exit.DONE, ""),
}


@pytest.mark.parametrize("scheme", ["sqlite", "lmdb"])
@pytest.mark.parametrize(("words", "expected"), MISTYPED.items(), ids=MISTYPED)
def test_a_store_at_a_mistyped_path_is_not_created(
    words: str,
    expected: tuple[Exit, str],
    scheme: str,
    stocked: World,
    command: Callable[[str], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(STORE, f"{scheme}://{tmp_path}/mistyped/states")
    code, said = expected
    assert command(words) == code
    out, err = capsys.readouterr()
    assert said in out + err
    assert list(tmp_path.iterdir()) == []
    assert not (stocked.directory / "x").exists()
