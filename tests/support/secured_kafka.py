"""A broker for single tests with authentication and authorization: SASL_SSL with SCRAM, mutual TLS, and ACLs."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from jobs.stack import kafka, ports, process

_SECURED, _MUTUAL = "secured", "mutual"
_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_READY_SECONDS = 120.0


@dataclass(frozen=True)
class SecuredKafka:
    """A running broker.

    Attributes:
        bootstrap: Its SASL_SSL listener.
        mutual: Its SSL listener, which requires a client certificate.
        inside: Its plain listener without restrictions, for a test's preparations.
        authority: PEM file of the certificate authority.
    """

    bootstrap: str
    mutual: str
    inside: str
    authority: Path

    def environment(self, user: str, password_file: Path, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
        """headwater's environment variables for a connection as `user`."""
        return {
            "HEADWATER_KAFKA_BOOTSTRAP": self.bootstrap,
            "HEADWATER_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "HEADWATER_KAFKA_SASL_MECHANISM": mechanism,
            "HEADWATER_KAFKA_SASL_USERNAME": user,
            "HEADWATER_KAFKA_SASL_PASSWORD_FILE": str(password_file),
            "HEADWATER_KAFKA_SSL_CA_LOCATION": str(self.authority),
        }

    def certified(self, certificate: Path, key: Path, password_file: Path) -> dict[str, str]:
        """The environment variables for its SSL listener, with a certificate whose key has a password."""
        return {
            "HEADWATER_KAFKA_BOOTSTRAP": self.mutual,
            "HEADWATER_KAFKA_SECURITY_PROTOCOL": "SSL",
            "HEADWATER_KAFKA_SSL_CA_LOCATION": str(self.authority),
            "HEADWATER_KAFKA_SSL_CERTIFICATE_LOCATION": str(certificate),
            "HEADWATER_KAFKA_SSL_KEY_LOCATION": str(key),
            "HEADWATER_KAFKA_SSL_KEY_PASSWORD_FILE": str(password_file),
        }

    def allow(self, user: str, operation: AclOperation, kind: ResourceType, name: str) -> None:
        """Grant `user` one operation on topics or groups with this name prefix."""
        binding = AclBinding(
            kind,
            name,
            ResourcePatternType.PREFIXED,
            f"User:{user}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        admin = AdminClient({"bootstrap.servers": self.inside})
        (done,) = admin.create_acls([binding]).values()
        done.result(30)


@contextmanager
def secured_kafka(users: dict[str, str], trusted: Path) -> Iterator[SecuredKafka]:
    """A broker in a temporary directory; it is stopped and its data deleted at the end of the `with` block.

    Users have no rights before `SecuredKafka.allow`.

    Args:
        users: Password by name, for both kinds of SCRAM.
        trusted: PEM file of the certificate that clients of the SSL listener must use.
    """
    home = Path(tempfile.mkdtemp(prefix="headwater-secured-"))
    try:
        key, authority = certificate(home, "broker")
        keystore = home / "keystore.pem"
        keystore.write_text(key.read_text() + authority.read_text())
        chosen = ports.remembered(home, kafka.PORTS)
        outside = ports.remembered(_made(home / "outside"), (_SECURED, _MUTUAL))
        launch = kafka.prepare(
            home,
            heap_mb=384,
            progress=lambda _line: None,
            properties=_properties(chosen | outside, keystore, trusted),
            format_options=[
                part
                for name, password in users.items()
                for mechanism in _MECHANISMS
                for part in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
            ],
        )
        log = home / "kafka.log"
        pid = process.spawn(launch.command, log, home)
        started = process.start_of(pid)
        assert started is not None, log.read_text()
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not launch.is_ready():
                assert process.start_of(pid) == started and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            secured, mutual = (f"{ports.LOOPBACK}:{outside[name]}" for name in (_SECURED, _MUTUAL))
            yield SecuredKafka(secured, mutual, launch.address, authority)
        finally:
            process.stop(pid, started, launch.stop_seconds)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def encrypted(key: Path, password: str) -> Path:
    """The key with a password, in a format that Java 17 can read."""
    made = key.with_suffix(".encrypted.pem")
    command = ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(made), "-v1", "PBE-SHA1-3DES"]
    subprocess.run([*command, "-passout", f"pass:{password}"], check=True, capture_output=True)
    return made


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a key and a certificate for loopback that is its own authority; return their PEM files."""
    key, made = directory / f"{name}-key.pem", directory / f"{name}-certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(made)]
        + ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    return key, made


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _properties(chosen: dict[str, int], keystore: Path, trusted: Path) -> dict[str, str]:
    protocols = {"PLAINTEXT": "PLAINTEXT", "SECURED": "SASL_SSL", "MUTUAL": "SSL", "CONTROLLER": "PLAINTEXT"}
    at = {"PLAINTEXT": chosen["client"], "SECURED": chosen[_SECURED], "MUTUAL": chosen[_MUTUAL]}
    listeners = ",".join(f"{name}://127.0.0.1:{port}" for name, port in at.items())
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    return {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{chosen['controller']}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "sasl.enabled.mechanisms": ",".join(_MECHANISMS),
        **{f"listener.name.{_SECURED}.{name.lower()}.sasl.jaas.config": login for name in _MECHANISMS},
        **{f"listener.name.{name}.ssl.keystore.type": "PEM" for name in (_SECURED, _MUTUAL)},
        **{f"listener.name.{name}.ssl.keystore.location": str(keystore) for name in (_SECURED, _MUTUAL)},
        f"listener.name.{_MUTUAL}.ssl.client.auth": "required",
        f"listener.name.{_MUTUAL}.ssl.truststore.type": "PEM",
        f"listener.name.{_MUTUAL}.ssl.truststore.location": str(trusted),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # The plain listeners: the node itself and what a test prepares.
        "super.users": "User:ANONYMOUS",
    }
