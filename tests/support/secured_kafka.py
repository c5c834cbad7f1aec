"""A broker of a test's own that asks who is there and what they may do: SASL_SSL, SCRAM-SHA-512 and ACLs."""

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

_LISTENER = "secured"
_READY_SECONDS = 120.0


@dataclass(frozen=True)
class SecuredKafka:
    """A broker that runs.

    Attributes:
        bootstrap: Its SASL_SSL listener.
        inside: Its plain listener, where everybody may do everything: for what a test prepares.
        authority: PEM file of the certificate authority.
    """

    bootstrap: str
    inside: str
    authority: Path

    def environment(self, user: str, password_file: Path) -> dict[str, str]:
        """What reaches it as `user`, in headwater's environment variables."""
        return {
            "HEADWATER_KAFKA_BOOTSTRAP": self.bootstrap,
            "HEADWATER_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "HEADWATER_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "HEADWATER_KAFKA_SASL_USERNAME": user,
            "HEADWATER_KAFKA_SASL_PASSWORD_FILE": str(password_file),
            "HEADWATER_KAFKA_SSL_CA_LOCATION": str(self.authority),
        }

    def allow(self, user: str, operation: AclOperation, kind: ResourceType, name: str) -> None:
        """Give `user` one right to a topic or group, by its name's beginning."""
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
def secured_kafka(users: dict[str, str]) -> Iterator[SecuredKafka]:
    """A broker in a temporary directory that ends, with its data, where the `with` block does.

    Args:
        users: Password by name; none of them has a right before `SecuredKafka.allow`.
    """
    home = Path(tempfile.mkdtemp(prefix="headwater-secured-"))
    try:
        key, authority = certificate(home, "broker")
        keystore = home / "keystore.pem"
        keystore.write_text(key.read_text() + authority.read_text())
        chosen = ports.remembered(home, kafka.PORTS)
        port = next(iter(ports.remembered(_made(home / "secured"), (_LISTENER,)).values()))
        launch = kafka.prepare(
            home,
            heap_mb=384,
            progress=lambda _line: None,
            properties=_properties(chosen, port, keystore),
            format_options=[
                part
                for name, password in users.items()
                for part in ("--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]")
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
            yield SecuredKafka(f"{ports.LOOPBACK}:{port}", launch.address, authority)
        finally:
            process.stop(pid, started, launch.stop_seconds)
    finally:
        shutil.rmtree(home, ignore_errors=True)


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


def _properties(chosen: dict[str, int], port: int, keystore: Path) -> dict[str, str]:
    listeners = f"PLAINTEXT://127.0.0.1:{chosen['client']},SECURED://127.0.0.1:{port}"
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    return {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{chosen['controller']}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        f"listener.name.{_LISTENER}.scram-sha-512.sasl.jaas.config": login,
        f"listener.name.{_LISTENER}.ssl.keystore.type": "PEM",
        f"listener.name.{_LISTENER}.ssl.keystore.location": str(keystore),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # The plain listeners: the node itself and what a test prepares.
        "super.users": "User:ANONYMOUS",
    }
