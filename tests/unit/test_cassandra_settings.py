from pathlib import Path

import pytest

from persistence.cassandra import schema
from persistence.cassandra.settings import CassandraSettings, Replication, Tls
from persistence.credentials import Secret
from persistence.errors import Terminal
from persistence.registry import open_store


def test_a_url_names_hosts_ports_and_keyspace():
    settings = CassandraSettings.parse("cassandra://a.example:9142,b.example,[::1]:9043/fleet")
    assert settings.hosts == (("a.example", 9142), ("b.example", 9042), ("::1", 9043))
    assert settings.keyspace == "fleet"
    assert settings == CassandraSettings(settings.hosts, "fleet")


def test_options_are_read():
    settings = CassandraSettings.parse(
        "cassandra://h/ks?dc=paris&consistency=quorum&serial_consistency=serial&mode=timestamp&buckets=64"
        "&batch_bytes=20000&max_value_bytes=4000000&concurrency=2&timeout=3&connect_timeout=1.5&retry_for=9"
        "&replication=paris:3,oslo:2"
    )
    assert (settings.dc, settings.consistency, settings.serial_consistency) == ("paris", "quorum", "serial")
    assert (settings.mode, settings.buckets, settings.batch_bytes, settings.concurrency) == ("timestamp", 64, 20000, 2)
    assert (settings.max_value_bytes, settings.timeout, settings.connect_timeout) == (4_000_000, 3.0, 1.5)
    assert settings.retry_for == 9.0
    assert settings.replication == Replication(datacentres=(("paris", 3), ("oslo", 2)))


@pytest.mark.parametrize(
    "url",
    [
        "cassandra://",
        "cassandra://host",
        "cassandra:///ks",
        "cassandra://host/",
        "cassandra://host/Upper",
        "cassandra://host/1st",
        "cassandra://host/two/parts",
        "cassandra://host/k'; DROP KEYSPACE x",
        "cassandra://host:port/ks",
        "cassandra://host:99999/ks",
        "cassandra://a,,b/ks",
        "cassandra://host/Xks",
    ],
)
def test_a_url_without_hosts_or_keyspace_is_refused_with_an_example(url):
    with pytest.raises(
        Terminal,
        match=r"^cassandra:.* (names no keyspace.*|has an invalid host)\. Write cassandra://host:9042/keyspace",
    ):
        CassandraSettings.parse(url)


@pytest.mark.parametrize(
    "option",
    [
        "consistency=one",
        "serial_consistency=quorum",
        "mode=fast",
        "buckets=0",
        "buckets=many",
        "batch_bytes=10",
        "timeout=0",
        "replication=0",
        "replication=101",
        "replication=paris:101",
        "replication=paris:0",
        "replication=paris:3:2",
        "replication=paris:x",
        "replication=:3",
        "tls=maybe",
        "fetch=3",
    ],
)
def test_an_impossible_option_is_refused_without_quoting_it(option):
    with pytest.raises(Terminal) as caught:
        CassandraSettings.parse(f"cassandra://h/ks?{option}")
    name, _, value = option.partition("=")
    assert name in str(caught.value)
    assert f"={value}" not in str(caught.value)


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(
        Terminal, match=r"^cassandra://\.\.\.@h/ks contains a password.*\. Name .*password_file"
    ) as caught:
        open_store("cassandra://app:hunter2@h/ks")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_named_by_file_or_variable_and_read_late(tmp_path, monkeypatch):
    file = tmp_path / "password"
    settings = CassandraSettings.parse(f"cassandra://ap%40p@h/ks?password_file={file}")
    assert settings.username == "ap@p"
    assert settings.password == Secret(file=file)
    with pytest.raises(Terminal, match=f"{file} cannot be read"):
        settings.password.read()
    file.write_text("hunter2\n")
    assert settings.password.read() == "hunter2"

    monkeypatch.delenv("HW_TEST_PASSWORD", raising=False)
    settings = CassandraSettings.parse("cassandra://app@h/ks?password_env=HW_TEST_PASSWORD")
    with pytest.raises(Terminal, match="HW_TEST_PASSWORD is not set"):
        settings.password.read()
    monkeypatch.setenv("HW_TEST_PASSWORD", "hunter2")
    assert settings.password.read() == "hunter2"
    assert "hunter2" not in repr(settings)


def test_two_places_for_one_secret_are_refused():
    with pytest.raises(Terminal, match="both password_file and password_env"):
        CassandraSettings.parse("cassandra://app@h/ks?password_file=/x&password_env=Y")


def test_a_user_without_a_password_is_refused_when_it_connects():
    with pytest.raises(Terminal, match="a user without a password"):
        open_store("cassandra://app@127.0.0.1:1/ks").load_manifest(_flow())


def test_a_file_that_is_no_certificate_is_named_and_not_quoted(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("hunter2")
    with pytest.raises(Terminal, match=r"TLS cannot be set up from .*ca\.pem") as caught:
        open_store(f"cassandra://127.0.0.1:1/ks?tls_ca={file}").load_manifest(_flow())
    assert "hunter2" not in str(caught.value)


def test_tls_is_off_unless_it_is_asked_for():
    assert CassandraSettings.parse("cassandra://h/ks").tls is None
    assert CassandraSettings.parse("cassandra://h/ks?tls=off").tls is None
    assert CassandraSettings.parse("cassandra://h/ks?tls=on").tls == Tls()
    assert CassandraSettings.parse("cassandra://h/ks?tls_ca=/ca.pem&tls_hostname=ignore").tls == Tls(
        authority=Path("/ca.pem"), check_hostname=False
    )
    assert CassandraSettings.parse(
        "cassandra://h/ks?tls_cert=/c.pem&tls_key=/k.pem&tls_key_password_env=KEY&tls_hostname=check"
    ).tls == Tls(certificate=Path("/c.pem"), key=Path("/k.pem"), key_password=Secret(variable="KEY"))
    with pytest.raises(Terminal, match="names both tls_key_password_file and tls_key_password_env"):
        CassandraSettings.parse("cassandra://h/ks?tls_key_password_env=KEY&tls_key_password_file=/k")
    with pytest.raises(Terminal, match=r"^cassandra://h/ks\?.*tls=off.*\. Keep one of them"):
        CassandraSettings.parse("cassandra://h/ks?tls=off&tls_ca=/ca.pem")


def test_the_schema_is_printed_without_a_server():
    keyspace, *tables = schema("cassandra://h/fleet?replication=paris:3,oslo:2")
    assert keyspace == (
        "CREATE KEYSPACE IF NOT EXISTS fleet WITH replication = "
        "{'class': 'NetworkTopologyStrategy', 'paris': 3, 'oslo': 2} AND durable_writes = true"
    )
    assert [table.partition(" (")[0] for table in tables] == [
        "CREATE TABLE IF NOT EXISTS fleet.flow",
        "CREATE TABLE IF NOT EXISTS fleet.state",
        "CREATE TABLE IF NOT EXISTS fleet.due",
    ]


def test_a_keyspace_has_three_copies_unless_told_otherwise():
    assert "'replication_factor': 3}" in schema("cassandra://h/fleet")[0]
    assert "'replication_factor': 1}" in schema("cassandra://h/fleet?replication=1")[0]


def test_there_may_be_one_to_a_hundred_copies():
    assert Replication.parse("1") == Replication(everywhere=1)
    assert Replication.parse("100") == Replication(everywhere=100)
    assert Replication.parse("oslo:1, paris:100") == Replication(datacentres=(("oslo", 1), ("paris", 100)))


def test_a_datacentre_cannot_end_its_quotes():
    assert Replication.parse("o'slo:3").cql() == "{'class': 'NetworkTopologyStrategy', 'o''slo': 3}"


def _flow():
    from persistence.protocol import FlowRef

    return FlowRef("fleet")
