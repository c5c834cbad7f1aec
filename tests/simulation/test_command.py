"""The command: one seed, one schedule, the whole proof, and going on with it."""

import json

import pytest

from tests.simulation import prove as proving
from tests.simulation.__main__ import main
from tests.simulation.planted import planted
from tests.simulation.shrink import outcome, shrink
from tests.simulation.steps import draw_world


def test_a_seed_draws_the_same_world_every_time():
    assert draw_world(7) == draw_world(7)
    assert draw_world(7) != draw_world(8)


def test_a_seed_that_holds_ends_with_zero(capsys):
    assert main(["--seed", "3"]) == 0
    assert capsys.readouterr().out == "seed 3 holds\n"


def test_a_seed_that_fails_is_shrunk_and_what_is_printed_repeats_it(capsys):
    seed = proving.find("upstream-first")
    assert main(["--seed", str(seed), "--plant", "upstream-first"]) == 1
    *story, violation, repeat = capsys.readouterr().out.splitlines()
    assert len(story) < 12
    arguments = repeat.removeprefix("repeat: python -m tests.simulation ").split()
    assert main([*arguments, "--plant", "upstream-first"]) == 1
    assert violation in capsys.readouterr().out
    assert main(arguments) == 0


def test_a_schedule_can_be_run_alone(capsys):
    assert main(["--world", "9", "--faults", "12.before,20.unanswered"]) == 0
    assert capsys.readouterr().out == "holds\n"


def test_without_anything_to_do_it_says_what_there_is(capsys):
    assert main([]) == 2
    assert "--seed N" in capsys.readouterr().err


def test_shrinking_leaves_the_steps_that_are_needed():
    assert shrink(40, lambda steps: {3, 17, 38} <= set(steps)) == [3, 17, 38]


def test_the_proof_ends_with_one_json_object(tmp_path, capsys):
    state = tmp_path / "state.json"
    arguments = ["prove", "--seeds", "5", "--schedules", "10", "--state", str(state), "--json"]
    assert main([*arguments, "--bugs", "history-blind"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["seeds"] == 5
    assert summary["schedules"] >= 10
    assert summary["violations"] == 0
    assert summary["planted"] == summary["planted_found"] == 1
    assert json.loads(state.read_text())["seeds"] == 5


@pytest.fixture
def proof_of(tmp_path):
    state = tmp_path / "state.json"
    return lambda seeds: proving.prove(seeds, 0, bugs=(), state=state, workers=1)


def test_a_proof_goes_on_where_it_ended(proof_of, monkeypatch):
    assert proof_of(5).seeds == 5
    saved = proof_of(5)
    assert (saved.seeds, saved.violations) == (5, [])
    assert proof_of(10).seeds == 10


def test_a_proof_of_other_code_is_begun_anew(proof_of, monkeypatch):
    proof_of(5)
    monkeypatch.setattr(proving, "_digest", lambda: "another")
    assert proof_of(0).seeds == 0


def test_a_bug_planted_here_does_not_reach_other_seeds():
    with planted("history-blind"):
        assert any(outcome(seed) for seed in range(10))
    assert not any(outcome(seed) for seed in range(10))
