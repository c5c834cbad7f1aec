"""Settings of a Kafka cluster: a value whose text shows no secrets."""

import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from confluent_kafka import KafkaError

ENV_PREFIX: Final = "HEADWATER_KAFKA_"
_FILE_SUFFIX: Final = ".file"

SECRET_NAMES: Final = r"(?i)password|secret|jaas|\.pem\b|keystore\.key\b|oauthbearer\.config"  # noqa: S105 - names only
"""Names of settings whose values are never shown. Also meant for `spark.redaction.regex`."""

_SECRET = re.compile(SECRET_NAMES)
_ADDRESS = re.compile(r"(?:\w+://)?(?:\[[\w:.%]+\]|[^\s:/@\[\]]+)(?::\d{1,5})?")
_LOG = logging.getLogger("headwater.kafka")
_LOG.addHandler(logging.NullHandler())
# The client logs this for each producer.
_LOG.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())


class SettingsError(ValueError):
    """A setting that cannot be used. The text names it and never quotes its value."""


def is_secret(name: str) -> bool:
    """Whether the value of a setting of this name must not be shown."""
    return _SECRET.search(name) is not None


@dataclass(frozen=True, slots=True, repr=False)
class KafkaSettings:
    """Address and security of a Kafka cluster.

    Attributes:
        bootstrap: `host:port[,host:port...]`.
        options: librdkafka's settings by their own names (`security.protocol`, `sasl.username`, ...).
    """

    bootstrap: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bootstrap.strip():
            raise SettingsError(
                f"no Kafka address: give HOST:PORT, set {ENV_PREFIX}BOOTSTRAP, or write bootstrap into the table [kafka] "
                "of the settings file"
            )
        if not all(_ADDRESS.fullmatch(address.strip()) for address in self.bootstrap.split(",")):
            raise SettingsError(
                f"Kafka address {self.bootstrap!r}: write HOST:PORT, or several with commas between them"
            )

    def __repr__(self) -> str:
        shown = {name: "***" if is_secret(name) else value for name, value in sorted(self.options.items())}
        return f"KafkaSettings(bootstrap={self.bootstrap!r}, options={shown!r})"

    @classmethod
    def load(
        cls,
        bootstrap: str | None = None,
        *,
        file: Path | None = None,
        table: Mapping[str, Any] | None = None,
        options: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Read the settings; arguments win over the environment, the environment over the file.

        `HEADWATER_KAFKA_SASL_USERNAME` sets `sasl.username`, `HEADWATER_KAFKA_BOOTSTRAP` the address, and so
        on. A setting whose name ends in `.file` (`_FILE` in the environment) is read from the file it
        names: `sasl.password.file = "/run/secrets/kafka"`.

        Args:
            bootstrap: `host:port[,host:port...]`.
            file: TOML file with a table `[kafka]` of these names. It must not contain a secret.
            table: That table of `file`, if it was read already.
            options: More settings by librdkafka's names.
            env: Environment; the process's own when None.

        Raises:
            SettingsError: No address, an unreadable file, or a secret in the settings file.
        """
        merged: dict[str, str] = {}
        for part in (
            _from_file(file, table) if file else {},
            _from_environment(os.environ if env is None else env),
            dict(options or {}),
        ):
            if servers := part.pop("bootstrap.servers", ""):
                part.setdefault("bootstrap", servers)
            merged |= part
        merged = dict(_resolved(name, value) for name, value in merged.items())
        address = merged.pop("bootstrap", "")
        return cls(bootstrap or address, merged)

    def with_options(self, **options: str) -> Self:
        """Return the settings with more options; underscores in a name stand for dots."""
        return type(self)(self.bootstrap, {**self.options, **{k.replace("_", "."): v for k, v in options.items()}})

    def client(self, on_error: Callable[[KafkaError], None] | None = None, **options: Any) -> dict[str, Any]:
        """Return a configuration for confluent-kafka.

        Options set by the user win over `options`, the caller's defaults (underscores stand for dots). The
        client's log lines go to the Python logger `headwater.kafka`.
        """
        config: dict[str, Any] = {"client.id": "headwater", "logger": _LOG}
        if "reconnect.backoff.ms" not in self.options:  # it may be longer
            # librdkafka waits up to ten seconds before it connects again; the Java client's default is one.
            config["reconnect.backoff.max.ms"] = 1000
        config |= {name.replace("_", "."): value for name, value in options.items()}
        config |= self.options
        if on_error:
            config["error_cb"] = on_error
        return config | {"bootstrap.servers": self.bootstrap}


def _from_file(path: Path, table: Mapping[str, Any] | None) -> dict[str, str]:
    if table is None:
        text = _read(path, f"the settings file {path}")
        try:
            table = tomllib.loads(text).get("kafka")
        except tomllib.TOMLDecodeError as error:  # its text has the line and no value
            raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None
    if not isinstance(table, Mapping):
        raise SettingsError(f"the settings file {path} has no table [kafka]")
    settings = dict(_flat(table))
    for name in settings:
        if is_secret(name) and not name.endswith(_FILE_SUFFIX):
            raise SettingsError(
                f"{path} contains the secret {name}: put it into a separate file and name the file in "
                f"{name}{_FILE_SUFFIX}, or set {_env_name(name)}"
            )
    return settings


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """TOML reads `sasl.username = ...` as a table `sasl`; put the name together again."""
    pairs: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, str(value).lower() if isinstance(value, bool) else str(value)))
    return pairs


def _from_environment(env: Mapping[str, str]) -> dict[str, str]:
    start = len(ENV_PREFIX)
    return {name[start:].lower().replace("_", "."): value for name, value in env.items() if name.startswith(ENV_PREFIX)}


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", "_")


def _resolved(name: str, value: str) -> tuple[str, str]:
    if not name.endswith(_FILE_SUFFIX):
        return name, value
    return name.removesuffix(_FILE_SUFFIX), _read(Path(value), f"the file named by {name}").strip()


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{what} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{what} cannot be read: it is not UTF-8") from error
