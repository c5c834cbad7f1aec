"""Where commands find Kafka and the stores, and how text of the command line becomes a setting.

What is given on the command line wins, then the environment, then what a flow's definition says, then what
runs or lies on this machine.
"""

import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aggregations.definition.flow import Flow
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from jobs import stack
from jobs.environment import DEBUG, SPARK_LOG_LEVEL, STORE
from persistence.kafka import KafkaSettings
from persistence.kafka.settings import ENV_PREFIX

BOOTSTRAP: Final = f"{ENV_PREFIX}BOOTSTRAP"
_ADDRESSES: Final = (BOOTSTRAP, f"{BOOTSTRAP}_SERVERS")
HOME: Final = Path(".headwater")
"""What headwater keeps on this machine: the local stack and the embedded store."""

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class UsageError(ValueError):
    """Something on the command line or in the environment cannot be used; the text says what to write instead."""


def kafka(bootstrap: str | None = None, root: Path = stack.DEFAULT_ROOT, file: Path | None = None) -> KafkaSettings:
    """Return how to reach Kafka: by `bootstrap`, the environment or `file`, else the stack that runs in `root`.

    Args:
        bootstrap: `host:port[,host:port...]`; it wins over the environment, the environment over the file.
        root: Directory of the local stack, which needs no settings.
        file: TOML file with a table `[kafka]`, see `KafkaSettings.load`.

    Raises:
        UsageError: None of them says where Kafka is.
        SettingsError: A setting cannot be used.
    """
    if bootstrap or file is not None or any(os.environ.get(name) for name in _ADDRESSES):
        return KafkaSettings.load(bootstrap, file=file)
    running = stack.status(root)
    if running is None or running.find("kafka") is None:
        raise UsageError(
            f"no Kafka: give --bootstrap HOST:PORT, set {BOOTSTRAP}, or start a local one with `headwater stack up`"
        )
    return KafkaSettings(running.kafka)


def stores(flow: Flow[Any], given: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the URL of the store of every stage.

    Per stage the first of: `STAGE=URL` in `given`, `URL` in `given`, the flow's definition, `HEADWATER_STORE`,
    and the embedded store, a SQLite file in `.headwater`.

    Args:
        flow: The flow.
        given: What `--store` had: `URL` for all stages, `STAGE=URL` for one.
        env: Environment.

    Raises:
        UsageError: Two URLs for one stage, or text that is no URL.
        FlowError: A stage that the flow does not have.
    """
    by_stage: dict[str, str] = {}
    for text in given:
        stage, url = _named(text)
        if stage in by_stage:
            raise UsageError(f"--store: two stores for {f'stage {stage}' if stage else 'all stages'}: give one")
        by_stage[stage] = url
    every = by_stage.pop("", "")
    if every:
        by_stage = {stage.name: every for stage in flow.stages} | by_stage
    return bind(flow, by_stage, env.get(STORE) or f"sqlite://{(HOME / 'states.db').absolute()}")


def _named(text: str) -> tuple[str, str]:
    """`STAGE=URL` or `URL`; an `=` behind the `://` belongs to the URL."""
    head, separator, tail = text.partition("://")
    stage, equals, scheme = head.rpartition("=")
    if not separator or not scheme or (equals and not stage):
        # The text may hold a password.
        raise UsageError("--store: write URL or STAGE=URL, for example sqlite://states.db or carrier=sqlite://c.db")
    return stage, f"{scheme}://{tail}"


def seconds(text: str) -> float:
    """Read a duration: `500ms`, `1s`, `2m`, `1h`, or a bare number of seconds.

    Raises:
        UsageError: It is none, or not above zero.
    """
    found = _DURATION.fullmatch(text.strip())
    length = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if length <= 0:
        raise UsageError(f"{text!r} is no duration: write 500ms, 1s, 2m or 1h")
    return length


def patience(text: str) -> float:
    """Read how long to wait: a duration as `seconds` reads it, `0` for not at all, `forever` for infinity.

    Raises:
        UsageError: It is none.
    """
    if text.strip() == "forever":
        return math.inf
    return 0.0 if text.strip() == "0" else seconds(text)


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
    """Return Spark settings for a flow that runs in this process: `NAME=VALUE` texts, and where it logs and scratches.

    Spark's own log is silent unless `HEADWATER_SPARK_LOG_LEVEL` says otherwise, or a stack trace was asked for.
    Its scratch files go where this process has its own, `TMPDIR`.

    Raises:
        UsageError: A text is no such pair.
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
        FlowError: There is no such stage, or none was named and there are several.
    """
    if name is None:
        if len(flow.stages) > 1:
            raise FlowError(f"flow {flow.name!r} has the stages {', '.join(s.name for s in flow.stages)}: give --stage")
        return flow.stages[0].name
    return flow.stage(name).name
