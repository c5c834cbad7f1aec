import pytest

from persistence.credentials import Secret
from persistence.errors import Terminal
from persistence.names import FlowRef
from persistence.redis.calls import chunks
from persistence.redis.layout import RedisLayout, by_bucket
from persistence.redis.settings import RISKS, RedisSettings, read_place, read_settings

STAGE = FlowRef("fleet").stage("aircraft")


@pytest.mark.parametrize(
    ("url", "kind", "tls", "hosts", "rest"),
    [
        ("redis://localhost", "single", False, (("localhost", 6379),), ("", "", 0)),
        ("redis://:7000", "single", False, (("localhost", 7000),), ("", "", 0)),
        ("redis://127.0.0.1:7000/3", "single", False, (("127.0.0.1", 7000),), ("", "", 3)),
        ("rediss://[::1]:7000", "single", True, (("::1", 7000),), ("", "", 0)),
        ("redis+unix:///run/redis/r%20.sock", "single", False, (), ("/run/redis/r .sock", "", 0)),
        ("redis+sentinel://a,b:1/main", "sentinel", False, (("a", 26379), ("b", 1)), ("", "main", 0)),
        ("rediss+sentinel://a/main/2", "sentinel", True, (("a", 26379),), ("", "main", 2)),
        ("redis+cluster://a:1,b:2,c", "cluster", False, (("a", 1), ("b", 2), ("c", 6379)), ("", "", 0)),
        ("rediss+cluster://a", "cluster", True, (("a", 6379),), ("", "", 0)),
    ],
)
def test_a_url_says_where_the_servers_are(url, kind, tls, hosts, rest):
    place = read_place(url)
    assert (place.kind, place.tls, place.hosts) == (kind, tls, hosts)
    assert (place.socket, place.service, place.db) == rest


def test_user_and_password_are_read_and_never_shown():
    place = read_place("redis://me:p%40ss@host/1")
    assert (place.username, place.password) == ("me", "p@ss")
    assert read_place("redis://me:p:w@host").password == "p:w"
    assert read_place("redis://:secret@host").username is None
    assert read_place("redis://me@host").password is None
    assert "p@ss" not in repr(place)


def test_a_password_may_stand_in_a_file_or_a_variable(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("hunter2\n")
    monkeypatch.setenv("REDIS_PASSWORD", "hunter3")
    kept = read_settings(f"rediss://me@h?password_file={tmp_path}/secret&sentinel_password_env=REDIS_PASSWORD")
    assert kept.password.read() == "hunter2"
    assert kept.sentinel_password.read() == "hunter3"
    assert "hunter" not in repr(kept)
    assert "hunter2" not in repr(read_settings("redis+sentinel://h/main?sentinel_password=hunter2"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@h?password_env=X",
        "redis://h?password_env=X&password_file=/x",
        "redis://h?sentinel_password=hunter2&sentinel_password_env=X",
    ],
)
def test_two_passwords_are_refused_and_not_quoted(url):
    with pytest.raises(Terminal, match=r"^redis://h\?.* names both sentinel_password_file and sentinel_password_env"):
        read_settings("redis://h?sentinel_password_env=A&sentinel_password_file=/x")
    with pytest.raises(Terminal, match=r"^redis://(\.\.\.@)?h\?.*\. Keep one of them") as caught:
        read_settings(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://host:port", "redis://host/x", "redis+sentinel://a", "redis+cluster://a/2"])
def test_a_url_that_cannot_be_read_says_how_to_write_it(url):
    with pytest.raises(
        Terminal, match=r"^redis.* is invalid\. Write redis://|^redis.*: a cluster has no.*\. Remove the number"
    ):
        read_place(url)


def test_options_have_defaults_and_can_be_set():
    assert read_settings("redis://h") == RedisSettings()
    assert read_settings(
        "rediss://h?timeout=2&retry_for=0.5&buckets=8&prefix=mine&wait=2&waitaof=1,2&accept=eviction,no-aof&ssl_ca_certs=/ca"
    ) == RedisSettings(
        timeout=2.0,
        retry_for=0.5,
        buckets=8,
        prefix="mine",
        wait=2,
        waitaof=(1, 2),
        accept=frozenset({"eviction", "no-aof"}),
        client=(("ssl_ca_certs", "/ca"),),
    )


def test_every_option_has_its_place(tmp_path):
    tls = [("ssl_certfile", "/c"), ("ssl_keyfile", "/k"), ("ssl_cert_reqs", "none")]
    names = [("client_name", "hw"), ("sentinel_username", "me")]
    kept = read_settings(
        f"rediss://h?connect_timeout=1&sentinel_password_file={tmp_path}/s&"
        + "&".join(f"{a}={b}" for a, b in tls + names)
    )
    assert kept == RedisSettings(
        connect_timeout=1, sentinel_password=Secret(file=tmp_path / "s"), client=(*tls, *names)
    )


def test_the_limits_of_an_option_are_possible_values():
    assert read_settings("redis://h?buckets=1&wait=0&waitaof=0") == RedisSettings(buckets=1, wait=0, waitaof=(0, 0))
    assert read_settings("redis://h?buckets=16384&wait=1&waitaof=0,1&prefix=X") == RedisSettings(
        buckets=16384, wait=1, waitaof=(0, 1), prefix="X"
    )
    assert read_settings("redis://h?accept=eviction,no-aof,replica,fsync,unwaited-replicas").accept == RISKS
    assert read_settings("redis://h?timeout=1.5&wait_timeout=1.4&wait=1").wait_timeout == 1.4
    assert read_settings("redis://h?timeout=1&wait_timeout=1").wait_timeout == 1


@pytest.mark.parametrize(
    "options", ["wait=1&wait_timeout=6", "wait=1&wait_timeout=5&timeout=5", "waitaof=1&wait_timeout=9"]
)
def test_replicas_cannot_be_waited_for_longer_than_for_an_answer(options):
    with pytest.raises(
        Terminal, match=r"wait_timeout is not shorter than timeout\. Raise timeout or lower wait_timeout"
    ):
        read_settings(f"redis://h?{options}")


@pytest.mark.parametrize(
    "option",
    [
        "timeout=0",
        "timeout=inf",
        "buckets=0",
        "buckets=16385",
        "buckets=x",
        "prefix=a{b}",
        "prefix=",
        "wait=-1",
        "waitaof=2",
        "waitaof=1,2,3",
        "waitaof=1,-1",
        "accept=everything",
        "socket_timeout=3",
        "retry=9",
        "wait=1&wait_timeout=5",
        "ssl_ca_certs=/ca",  # of a connection without encryption
    ],
)
def test_an_impossible_option_is_refused_with_the_remedy(option):
    with pytest.raises(Terminal, match=r"\. (Write|Known options|Raise timeout)"):
        read_settings(f"redis://h?{option}")


def test_key_names_are_the_documented_ones():
    layout = RedisLayout()
    assert layout.flow(FlowRef("fleet")) == b"hw:{fleet:1}"
    assert layout.bucket(FlowRef("fleet", 2), 5) == b"hw:{fleet:2:5}"
    assert layout.states(STAGE, 5) == b"hw:{fleet:1:5}:aircraft"
    assert RedisLayout("mine").states(STAGE, 0) == b"mine:{fleet:1:0}:aircraft"


def test_the_buckets_are_divided_as_kafka_divides_partitions():
    assert by_bucket([b"foobar", b"abc"], [1, 2], 64) == {-790332482 % 64: [1], 479470107 % 64: [2]}
    assert by_bucket([b"abc", b"foobar"], [1, 2], 1) == {0: [1, 2]}
    assert by_bucket([], [], 4) == {}


def test_calls_are_bounded_by_number_and_by_bytes():
    assert chunks([], 3, 100) == []
    assert chunks([1] * 7, 3, 100) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert chunks([60, 60, 10, 10, 200, 1], 10, 100) == [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6)]
