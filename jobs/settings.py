"""Where commands find Kafka and the stores, and how text of the command line becomes a setting.

The command line wins over the environment, the environment over `headwater.toml`, that over a flow's definition, and
the definition over the defaults: what runs or lies on this machine.
"""

import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from aggregations.definition.flow import Flow
from aggregations.engine.options import RunOptions
from aggregations.engine.sampling import ALL
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from jobs import stack
from jobs.directory import FILE, Directory
from jobs.environment import DEBUG, SPARK_LOG_LEVEL, STORE, NotThereError, UsageError
from persistence.kafka import KafkaSettings
from persistence.kafka.settings import ENV_PREFIX
from persistence.registry import open_store
from persistence.urls import embedded, redact

BOOTSTRAP: Final = f"{ENV_PREFIX}BOOTSTRAP"
_ADDRESSES: Final = (BOOTSTRAP, f"{BOOTSTRAP}_SERVERS")
HOME: Final = Path(".headwater")
"""What headwater keeps on this machine: the local stack and the embedded store."""
DEFAULT: Final = "default"
"""The origin of a default setting."""
T = TypeVar("T")

_OPTIONS: Final = ("stores", "dead_letters", "journal", "journal_share", "generation")
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_LONGEST_SECONDS: Final = 100 * 365 * 86_400.0
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def kafka(
    bootstrap: str | None = None,
    root: Path = stack.DEFAULT_ROOT,
    file: Path | None = None,
    *,
    directory: Directory | None = None,
) -> KafkaSettings:
    """Return the Kafka settings: from `bootstrap`, the environment or a file, else of the local stack in `root`.

    Args:
        bootstrap: `host:port[,host:port...]`; it overrides the environment, which overrides the file.
        root: Directory of the local stack, which needs no settings.
        file: TOML file with a table `[kafka]`, see `KafkaSettings.load`. None: that of `headwater.toml`, if any.
        directory: Content of `headwater.toml`, if it was read already.

    Raises:
        UsageError: None of them gives an address.
        DirectoryError: `headwater.toml` cannot be used.
        SettingsError: A setting cannot be used.
    """
    table = None
    if file is None:
        directory = directory or Directory.load()
        table = directory.kafka
        file = directory.path if table is not None else None
    if bootstrap or file is not None or any(os.environ.get(name) for name in _ADDRESSES):
        return KafkaSettings.load(bootstrap, file=file, table=table)
    running = stack.status(root)
    if running is None or running.find("kafka") is None:
        raise UsageError(
            f"no Kafka: give --bootstrap HOST:PORT, set {BOOTSTRAP} or [kafka] bootstrap in {FILE}, "
            "or start a local one with `headwater stack up`"
        )
    return KafkaSettings(running.kafka)


def other_cluster(text: str | None) -> tuple[str, KafkaSettings | None]:
    """Read `--from-cluster`: the name and the settings of another Kafka cluster; without a text, none.

    The environment and `headwater.toml` describe the cluster that is written, and are not used.

    Raises:
        UsageError: It is not NAME=HOST:PORT or NAME=FILE.
        SettingsError: A setting cannot be used.
    """
    if text is None:
        return "", None
    name, _, place = text.partition("=")
    if not name or not place:
        raise UsageError(f"--from-cluster {text!r}: write NAME=HOST:PORT, or NAME=FILE.toml with a table [kafka]")
    if place.endswith(".toml"):
        return name, KafkaSettings.load(file=Path(place), env={})
    return name, KafkaSettings.load(place, env={})


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """Where a flow keeps its states and its dead letters, and the origin of each setting.

    Attributes:
        stores: URL of the store by stage name.
        dead_letters: The dead-letter topic; None when there is none.
        generation: Generation of the states; None for the live one.
        origins: Origin of each setting, by `store of STAGE`, `dead letters`, `journal`, `generation`,
            `journal's share of events`.
        journal: Topic of the journal; None when there is none.
        journal_share: Share of the events that it lists.
    """

    stores: dict[str, str]
    dead_letters: str | None
    generation: int | None
    origins: Mapping[str, str]
    journal: str | None = None
    journal_share: float = ALL

    def options(self, **given: Any) -> RunOptions:
        """The options of a run with these settings, and with other fields of `RunOptions`."""
        named = {name: getattr(self, name) for name in _OPTIONS}
        return RunOptions(**{**named, **given})

    def shown(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of each setting; URLs are shown without secrets."""
        shown = {f"store of {stage}": redact(url) for stage, url in self.stores.items()}
        shown["generation"] = "live" if self.generation is None else str(self.generation)
        if self.dead_letters is not None:
            shown["dead letters"] = self.dead_letters
        if self.journal is not None:
            shown["journal"] = self.journal
            if self.journal_share != ALL:
                shown["journal's share of events"] = f"{self.journal_share:g}"
        return [(name, value, self.origins[name]) for name, value in shown.items()]

    def lines(self) -> list[str]:
        """One line per setting, with its origin."""
        return [f"{name}: {value} ({origin})" for name, value, origin in self.shown()]

    def store_line(self, stage: str, generation: int) -> str:
        """A stage's generation and store, with the store's origin."""
        name = f"store of {stage}"
        return f"stage {stage}, generation {generation}: {redact(self.stores[stage])} ({self.origins[name]})"


def of_flow(
    flow: Flow[Any],
    store: Sequence[str] | None = None,
    *,
    dead_letters: str | None = None,
    journal: str | None = None,
    journal_share: float | None = None,
    generation: int | None = None,
    env: Mapping[str, str] = os.environ,
    directory: Directory | None = None,
) -> FlowSettings:
    """Return the settings of a flow: each from the first of these sources, its most specific entry first.

    1. The command line: `--store STAGE=URL`, `--store URL`, `--dead-letters`, `--journal`,
       `--journal-share`, `--generation`.
    2. The environment: `HEADWATER_STORE`.
    3. `headwater.toml` of the current directory.
    4. The flow's definition: `aggregate(..., store=URL)`.
    5. The default: the LMDB store in `.headwater/states`, no dead-letter topic, no journal, all
       events in it, the live generation.

    Args:
        flow: The flow.
        store: Values of `--store`: `URL` for all stages, `STAGE=URL` for one.
        dead_letters: Value of `--dead-letters`.
        journal: Value of `--journal`.
        journal_share: Value of `--journal-share`.
        generation: Value of `--generation`.
        env: Environment.
        directory: Content of `headwater.toml`, if it was read already.

    Raises:
        UsageError: Two URLs for one stage, text that is not a URL, or a stage that the flow does not have.
        DirectoryError: `headwater.toml` cannot be used.
    """
    file = (directory or Directory.load()).of(flow.name)
    origins: dict[str, str] = {}

    def first(name: str, *found: tuple[str, T | None]) -> T | None:
        for origin, value in found:
            if value is not None and value != "":
                origins[name] = origin
                return value
        return None

    given = _given(store or ())
    for origin, stores in (("--store", given), (FILE, file.stores)):
        for name in stores.keys() - {""}:
            try:
                _ = name in flow.stage_names or flow.stage(name)
            except FlowError as error:
                raise UsageError(f"{origin}: {error}") from error
    if (everywhere := env.get(STORE)) and "://" not in everywhere:
        raise UsageError(f"{STORE}: write a URL, for example lmdb://states or redis://host")
    default = embedded("lmdb", HOME / "states")
    urls, defined = {}, {stage.name: stage.aggregate.store for stage in flow.stages}
    for name in flow.stage_names:
        url = first(
            f"store of {name}",
            ("--store", given.get(name) or given.get("")),
            (STORE, everywhere),
            (FILE, file.stores.get(name) or file.stores.get("")),
            ("the flow's definition", defined.get(name)),
            (DEFAULT, default),
        )
        urls[name] = url or default
    letters = first("dead letters", ("--dead-letters", dead_letters), (FILE, file.dead_letters))
    entries = first("journal", ("--journal", journal), (FILE, file.journal))
    share = first("journal's share of events", ("--journal-share", journal_share), (FILE, file.journal_share))
    number = first("generation", ("--generation", generation), (FILE, file.generation))
    origins.setdefault("generation", DEFAULT)
    return FlowSettings(bind(flow, urls), letters, number, origins, entries, ALL if share is None else share)


def check_shared(what: str, url: str, option: str = "--store") -> None:
    """Refuse a store that ends with this process.

    Args:
        what: What it is, for the error.
        url: Its URL.
        option: The option that names another one.

    Raises:
        UsageError: It is in memory.
    """
    with closing(open_store(url)) as store:
        if not store.capabilities.shared:
            raise UsageError(f"{what} is in the memory of one process: give another one with {option} URL")


def _given(texts: Sequence[str]) -> dict[str, str]:
    """URL by stage name; the empty name stands for all other stages."""
    by_stage: dict[str, str] = {}
    for text in texts:
        stage, url = _named(text)
        if stage in by_stage:
            raise UsageError(f"--store: two stores for {f'stage {stage}' if stage else 'all stages'}: give one")
        by_stage[stage] = url
    return by_stage


def _named(text: str) -> tuple[str, str]:
    """`STAGE=URL` or `URL`; an `=` after the `://` belongs to the URL."""
    head, separator, tail = text.partition("://")
    stage, equals, scheme = head.rpartition("=")
    if not separator or not scheme or (equals and not stage):
        # The text may contain a password.
        raise UsageError("--store: write URL or STAGE=URL, for example lmdb://states or carrier=redis://host")
    return stage, f"{scheme}://{tail}"


def seconds(text: str, option: str) -> float:
    """Read a duration, the value of an option: `500ms`, `1s`, `2m`, `1h`, or a bare number of seconds.

    Raises:
        UsageError: It is not a duration, not above zero, or longer than a hundred years.
    """
    found = _DURATION.fullmatch(text.strip())
    length = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if length <= 0:
        raise UsageError(f"{option}: {text!r} is not a duration; write for example 500ms, 1s, 2m or 1h")
    if length > _LONGEST_SECONDS:
        raise UsageError(f"{option}: the duration is longer than a hundred years")
    return length


def time(text: str, option: str) -> datetime:
    """Read a time with its zone, the value of an option.

    Raises:
        UsageError: It is not a time in ISO 8601, has no zone, or is not within the years 1 to 9999 in UTC.
    """
    try:
        found = datetime.fromisoformat(text)
        found.astimezone(UTC)  # fails if it is not within the years 1 to 9999 there
    except (ValueError, OverflowError):
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(f"{option}: {text!r} is not a time with its zone; write for example 2026-11-24T06:00:00Z")
    return found


def patience(text: str, option: str) -> float:
    """Read how long to wait: a duration as in `seconds`, `0` for no wait, `forever` for infinity.

    Raises:
        UsageError: The text is none of these.
    """
    if text.strip() == "forever":
        return math.inf
    return 0.0 if text.strip() == "0" else seconds(text, option)


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """Read `NAME=VALUE` texts of an option.

    Raises:
        UsageError: One has no name or no `=`.
    """
    found = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"{option}: write NAME=VALUE")
        found[name] = value
    return found


def spark(given: Sequence[str] = ()) -> dict[str, str]:
    """Return Spark settings for a flow that runs in this process: `NAME=VALUE` texts, and its log and scratch files.

    Spark's own log is off unless `HEADWATER_SPARK_LOG_LEVEL` sets another level, or stack traces are enabled.
    Its scratch files are in the directory of this process's, `TMPDIR`.

    Raises:
        UsageError: A text is not such a pair.
    """
    found = pairs(given, "--conf")
    if os.environ.get(DEBUG):
        os.environ.setdefault(SPARK_LOG_LEVEL, "warn")
    logging = Path(__file__).parent / "data" / "spark-log4j2.properties"
    java = f"-Dlog4j2.configurationFile={logging} -Djava.io.tmpdir={tempfile.gettempdir()}"
    found[_JAVA_OPTIONS] = f"{java} {found.get(_JAVA_OPTIONS, '')}".strip()
    return found


def stage_of(flow: Flow[Any], name: str | None) -> str:
    """Return the stage that is meant: `name`, or the only one.

    Raises:
        NotThereError: There is no such stage.
        FlowError: None was named, and there are several.
    """
    if not flow.stages:
        raise NotThereError(f"flow {flow.name!r} has no stage, so it keeps no states")
    if name is None:
        if len(flow.stages) > 1:
            raise FlowError(f"flow {flow.name!r} has the stages {', '.join(s.name for s in flow.stages)}: give --stage")
        return flow.stages[0].name
    try:
        return flow.stage(name).name
    except FlowError as error:
        raise NotThereError(str(error)) from error
