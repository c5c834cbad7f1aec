import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import loading, settings
from jobs.demo.flow import flow
from jobs.environment import UsageError
from jobs.loading import LoadError
from jobs.stack import ServerState, StackState


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, and nothing in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWATER_KAFKA_BOOTSTRAP", "HEADWATER_STORE", "HEADWATER_DEBUG", "HEADWATER_SPARK_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> str:
    """A local stack that runs, as far as can be seen."""
    server = ServerState("kafka", 1, "now", "127.0.0.1:20001", "log")
    monkeypatch.setattr(settings.stack, "status", lambda root: StackState(root, (server,)))
    return server.address


def test_kafka_is_the_local_stack_when_nothing_else_is_said(local: str) -> None:
    assert settings.kafka().bootstrap == local


def test_the_environment_wins_over_the_local_stack(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP", "broker:9092")
    assert settings.kafka().bootstrap == "broker:9092"


def test_the_command_line_wins_over_both(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP", "broker:9092")
    assert settings.kafka("other:9092").bootstrap == "other:9092"


def test_a_settings_file_wins_over_the_local_stack_and_the_environment_over_the_file(
    local: str, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bare / "headwater.toml"
    file.write_text('[kafka]\nbootstrap = "file:9092"\nsasl.username = "fleet"\n')
    assert settings.kafka(file=file).bootstrap == "file:9092"
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP_SERVERS", "broker:9092")
    assert settings.kafka(file=file).options == {"sasl.username": "fleet"}
    assert settings.kafka().bootstrap == "broker:9092"


def test_security_settings_of_the_environment_are_not_for_the_local_stack(
    local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    assert settings.kafka().options == {}
    assert settings.kafka("broker:9092").options == {"security.protocol": "SASL_SSL"}


def test_without_any_kafka_the_three_ways_to_one_are_named() -> None:
    with pytest.raises(UsageError, match=r"--bootstrap.*HEADWATER_KAFKA_BOOTSTRAP.*headwater stack up"):
        settings.kafka()


def test_states_go_to_a_file_of_this_directory_when_nothing_else_is_said(bare: Path) -> None:
    url = f"lmdb://{bare}/.headwater/states"
    assert settings.of_flow(flow).stores == {"aircraft": url, "carrier": url}


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        (["redis://r"], {"aircraft": "redis://r", "carrier": "redis://r"}),
        (["redis://r", "carrier=sqlite://c.db"], {"aircraft": "redis://r", "carrier": "sqlite://c.db"}),
        (["carrier=sqlite://c.db"], {"aircraft": "sqlite://env.db", "carrier": "sqlite://c.db"}),
        (["redis://r?a=b"], {"aircraft": "redis://r?a=b", "carrier": "redis://r?a=b"}),
        ([], {"aircraft": "sqlite://env.db", "carrier": "sqlite://env.db"}),
    ],
)
def test_a_stage_s_own_store_wins_over_the_one_of_all_and_that_over_the_environment(
    given: list[str], bound: dict[str, str]
) -> None:
    assert settings.of_flow(flow, given, env={"HEADWATER_STORE": "sqlite://env.db"}).stores == bound


def test_a_store_in_the_definition_wins_over_the_default_alone(bare: Path) -> None:
    mine = flow.aggregate("third", key="tail", fold=flow.stages[0].aggregate.fold, store="sqlite://mine.db")
    found = settings.of_flow(mine, env={})
    assert found.stores["third"] == "sqlite://mine.db"
    assert found.origins["store of third"] == "the flow's definition"
    (bare / "headwater.toml").write_text('store = "sqlite://file.db"\n')
    assert settings.of_flow(mine, env={}).stores["third"] == "sqlite://file.db"
    env = {"HEADWATER_STORE": "sqlite://env.db"}
    assert settings.of_flow(mine, env=env).stores["third"] == "sqlite://env.db"
    assert settings.of_flow(mine, ["redis://r"], env=env).stores["third"] == "redis://r"


@pytest.mark.parametrize("given", [["here"], ["=sqlite://a"], ["carrier="], ["://"], ["a://b", "c://d"]])
def test_a_store_that_is_no_url_is_refused_and_not_quoted(given: list[str]) -> None:
    with pytest.raises(UsageError, match="--store") as refused:
        settings.of_flow(flow, given)
    assert "here" not in str(refused.value)


def test_an_environment_whose_store_is_no_url_is_refused_and_not_quoted() -> None:
    with pytest.raises(UsageError, match="HEADWATER_STORE: write a URL") as refused:
        settings.of_flow(flow, env={"HEADWATER_STORE": "secret"})
    assert "secret" not in str(refused.value)


def test_a_store_for_a_stage_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="--store: flow 'flights' has no stage 'pilot'"):
        settings.of_flow(flow, ["pilot=sqlite://p.db"])


@pytest.mark.parametrize(
    ("text", "length"), [("500ms", 0.5), ("1s", 1), ("1.5 s", 1.5), ("2m", 120), ("1h", 3600), (" 3 ", 3)]
)
def test_durations_are_read(text: str, length: float) -> None:
    assert settings.seconds(text, "--trigger") == length


@pytest.mark.parametrize("text", ["", "s", "0", "-1s", "1d", "1s1", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--trigger: .*500ms"):
        settings.seconds(text, "--trigger")


@pytest.mark.parametrize("text", ["9" * 400, "876001h"])
def test_a_duration_of_more_than_a_hundred_years_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--older-than: the duration is longer than a hundred years"):
        settings.seconds(text, "--older-than")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-02:00", "2026-11-24T06:00:00"])
def test_a_time_without_a_zone_or_beyond_the_years_of_utc_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--window: .* is not a time with its zone"):
        settings.time(text, "--window")


@pytest.mark.parametrize(("text", "length"), [("0", 0.0), ("5m", 300.0), ("forever", math.inf)])
def test_how_long_to_wait_is_a_duration_or_not_at_all_or_for_ever(text: str, length: float) -> None:
    assert settings.patience(text, "--topic-wait") == length


@pytest.mark.parametrize("text", ["-1s", "never", ""])
def test_what_is_no_wait_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--topic-wait: .* is not a duration"):
        settings.patience(text, "--topic-wait")


def test_spark_s_settings_keep_the_user_s_java_options_behind_ours() -> None:
    found = settings.spark(["spark.a=b=c", "spark.driver.extraJavaOptions=-Xss4m"])
    assert found["spark.a"] == "b=c"
    assert found["spark.driver.extraJavaOptions"].endswith(" -Xss4m")
    logging = found["spark.driver.extraJavaOptions"].split()[0].partition("=")[2]
    assert "HEADWATER_SPARK_LOG_LEVEL" in Path(logging).read_text()


def test_the_only_stage_needs_no_name() -> None:
    single = replace(flow, name="one", steps=flow.steps[:3])
    assert settings.stage_of(single, None) == "aircraft"
    assert settings.stage_of(flow, "carrier") == "carrier"


@pytest.mark.parametrize(
    "reference", ["", "fleet", ":flow", "fleet:", "fleet flow", "fleet.py:flow()", "a:b:c", ".a:b"]
)
def test_what_is_no_reference_is_refused(reference: str) -> None:
    with pytest.raises(LoadError, match="MODULE:NAME"):
        loading.load(reference)


@pytest.fixture
def module(bare: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current directory, forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"fleet_{abs(hash(str(bare)))}"
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return name


def test_a_module_of_the_current_directory_is_found(module: str, bare: Path) -> None:
    (bare / f"{module}.py").write_text("class A:\n    b = 5\n")
    assert loading.load(f"{module}:A.b") == 5


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", ".py:1: SyntaxError"),
        ("x = 1", "has no 'flow'"),
        ("flow = 1", "is not a Flow but a int"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(code: str, said: str, module: str, bare: Path) -> None:
    (bare / f"{module}.py").write_text(code)
    with pytest.raises(LoadError) as refused:
        loading.load_flow(f"{module}:flow")
    assert said in str(refused.value)


def test_an_error_in_a_flow_s_definition_is_its_own(module: str, bare: Path) -> None:
    (bare / f"{module}.py").write_text("from aggregations.definition.flow import Flow\nflow = Flow('no name')\n")
    with pytest.raises(LoadError, match=rf"failed at {module}\.py:2: FlowError.*letters"):
        loading.load_flow(f"{module}:flow")
