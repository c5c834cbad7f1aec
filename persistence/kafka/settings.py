"""Settings of a Kafka cluster: one value for the client library and for Spark. Its text shows no secrets."""

import base64
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
_LOG = logging.getLogger("headwater.kafka")
_LOG.addHandler(logging.NullHandler())
# The client says so of each producer that is made.
_LOG.addFilter(lambda record: "enable.gapless.guarantee is experimental" not in record.getMessage())

# librdkafka's name -> the Java client's, where Spark needs it and the two differ.
_JAVA_NAMES: Final = {
    "sasl.mechanism": "sasl.mechanism",
    "sasl.mechanisms": "sasl.mechanism",
    "security.protocol": "security.protocol",
    "client.id": "client.id",
    "client.rack": "client.rack",
}
_LOGIN_MODULES: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}

_PBES2: Final = bytes.fromhex("06092a864886f70d01050d")
"""The object identifier 1.2.840.113549.1.5.13 in DER (RFC 8018)."""


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
            raise SettingsError(f"no Kafka address: give host:port, or set {ENV_PREFIX}BOOTSTRAP")

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
        config |= {name.replace("_", "."): value for name, value in options.items()}
        config |= self.options
        if on_error:
            config["error_cb"] = on_error
        return config | {"bootstrap.servers": self.bootstrap}

    def spark(self) -> dict[str, str]:
        """Return the same settings as options of Spark's Kafka source and sink (`kafka.` and Java's names).

        Certificates and keys given as files are passed by content (KIP-651), so executors do not need the files.

        Raises:
            SettingsError: A SASL mechanism has no simple translation.
        """
        java = {"bootstrap.servers": self.bootstrap}
        java |= {_JAVA_NAMES[name]: value for name, value in self.options.items() if name in _JAVA_NAMES}
        java |= _java_sasl(self.options) | _java_tls(self.options)
        return {f"kafka.{name}": value for name, value in java.items()}


def _from_file(path: Path, table: Mapping[str, Any] | None) -> dict[str, str]:
    try:
        if table is None:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("kafka", {})
    except tomllib.TOMLDecodeError as error:  # its text has the line and no value
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} cannot be read: {type(error).__name__}") from error
    settings = dict(_flat(table or {}))
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
    try:
        return name.removesuffix(_FILE_SUFFIX), Path(value).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the file named by {name} cannot be read: {type(error).__name__}") from error


def _java_sasl(options: Mapping[str, str]) -> dict[str, str]:
    if "sasl.username" not in options:
        return {}
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or ""
    if not (module := _LOGIN_MODULES.get(mechanism)):
        raise SettingsError(f"sasl.mechanism: Spark is set up for {', '.join(_LOGIN_MODULES)} only")
    user, password = (_jaas(options.get(name, "")) for name in ("sasl.username", "sasl.password"))
    return {"sasl.jaas.config": f"{module} required username={user} password={password};"}


def _jaas(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _java_tls(options: Mapping[str, str]) -> dict[str, str]:
    java: dict[str, str] = {}
    if authority := _pem(options, "ssl.ca"):
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    if certificate := _pem(options, "ssl.certificate"):
        java |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": certificate}
        java |= {"ssl.keystore.key": _java_key(_pem(options, "ssl.key"))}
    if password := options.get("ssl.key.password"):
        java["ssl.key.password"] = password
    if options.get("ssl.endpoint.identification.algorithm") == "none":
        java["ssl.endpoint.identification.algorithm"] = ""
    return java


def _java_key(pem: str) -> str:
    """A key that Spark can read: PKCS#8, and if it has a password, encrypted with the older scheme.

    Kafka's Java client asks Java 17 for a cipher named PBES2, which does not exist there. librdkafka reads all of them.
    """
    plain, encrypted = "-----BEGIN PRIVATE KEY-----" in pem, "-----BEGIN ENCRYPTED PRIVATE KEY-----" in pem
    if pem and not plain and not encrypted:
        raise SettingsError(
            "ssl.key is not PKCS#8: `openssl pkcs8 -topk8 -nocrypt` or `-v1 PBE-SHA1-3DES` makes one of it"
        )
    if encrypted and _PBES2 in base64.b64decode("".join(re.findall(r"^[A-Za-z0-9+/=]+$", pem, re.MULTILINE))):
        raise SettingsError(
            "ssl.key is encrypted by PBES2, which Spark's Kafka client cannot read: encrypt it by "
            "`openssl pkcs8 -topk8 -v1 PBE-SHA1-3DES`, or keep it without a password in a file that only headwater may read"
        )
    return pem


def _pem(options: Mapping[str, str], name: str) -> str:
    if text := options.get(f"{name}.pem"):
        return text
    if not (path := options.get(f"{name}.location")):
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the file named by {name}.location cannot be read: {type(error).__name__}") from error
