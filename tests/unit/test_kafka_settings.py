"""Where settings come from, which one wins, and that secrets stay out of sight."""

import pickle
from pathlib import Path

import pytest

from persistence.kafka import KafkaSettings, SettingsError, Topics
from persistence.kafka.settings import is_secret

SECRET = "hunter2-and-more"


def test_arguments_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text('[kafka]\nbootstrap = "file:1"\nsasl.username = "file"\nclient.id = "file"\nclient.rack = "r1"\n')
    env = {"HEADWATER_KAFKA_BOOTSTRAP": "env:1", "HEADWATER_KAFKA_CLIENT_ID": "env", "OTHER": "x"}
    settings = KafkaSettings.load(file=file, env=env, options={"sasl.username": "argument"})
    assert settings.bootstrap == "env:1"
    assert settings.options == {"sasl.username": "argument", "client.id": "env", "client.rack": "r1"}
    assert KafkaSettings.load("argument:1", file=file, env=env).bootstrap == "argument:1"


def test_a_setting_that_ends_in_file_is_read_from_that_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(f"{SECRET}\n")
    file = tmp_path / "headwater.toml"
    file.write_text(f'[kafka]\nbootstrap = "k:1"\nsasl.password.file = "{secret}"\n')
    assert KafkaSettings.load(file=file, env={}).options == {"sasl.password": SECRET}
    env = {"HEADWATER_KAFKA_SASL_PASSWORD_FILE": str(secret)}
    assert KafkaSettings.load("k:1", env=env).options == {"sasl.password": SECRET}


def test_a_secret_in_the_settings_file_is_refused_without_being_quoted(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text(f'[kafka]\nbootstrap = "k:1"\nsasl.password = "{SECRET}"\n')
    with pytest.raises(SettingsError, match="HEADWATER_KAFKA_SASL_PASSWORD") as caught:
        KafkaSettings.load(file=file, env={})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n[kafka\n", r"is not valid TOML: .*line 2"),
        ("\udcff", "cannot be read: it is not UTF-8"),
        ('bootstrap = "k:1"', r"has no table \[kafka\]"),
        ("kafka = 1", r"has no table \[kafka\]"),
    ],
    ids=["no toml", "no text", "no table", "no table either"],
)
def test_a_settings_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "headwater.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match=rf"headwater\.toml {said}"):
        KafkaSettings.load(file=file, env={})


def test_a_settings_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"kafka\.toml cannot be read: No such file or directory"):
        KafkaSettings.load(file=tmp_path / "kafka.toml", env={})


def test_no_address_is_an_error_that_says_how_to_give_one() -> None:
    with pytest.raises(SettingsError, match="HEADWATER_KAFKA_BOOTSTRAP"):
        KafkaSettings.load(env={})


@pytest.mark.parametrize("address", ["host:xx", "a:1:2", "a:1, b:", "http:/a", "a b:1", "u@a:1", ":9092", "a:9092,"])
def test_an_address_that_no_broker_can_have_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="write HOST:PORT"):
        KafkaSettings(address)


@pytest.mark.parametrize("address", ["a", "a:9092", "a.b-c:1, 127.0.0.1:2", "[::1]:9092", "SASL_SSL://a:9092", "a_1:9"])
def test_an_address_as_librdkafka_reads_it_is_taken(address: str) -> None:
    assert KafkaSettings(address).bootstrap == address


def test_secrets_are_in_no_text_of_the_settings_and_survive_pickling() -> None:
    secrets = {
        "sasl.password": SECRET,
        "ssl.key.password": SECRET,
        "ssl.key.pem": SECRET,
        "sasl.oauthbearer.config": SECRET,
    }
    settings = KafkaSettings("k:1", {"sasl.username": "me", **secrets})
    assert SECRET not in repr(settings) + str(settings) + f"{settings}"
    assert "me" in repr(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    "name", ["kafka.sasl.jaas.config", "kafka.ssl.keystore.key", "kafka.ssl.key.password", "ssl.key.pem"]
)
def test_every_name_that_carries_a_secret_into_spark_is_redacted(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["ssl.key.location", "ssl.ca.location", "sasl.username", "security.protocol"])
def test_names_and_places_of_files_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_the_client_gets_the_users_options_over_the_callers_defaults() -> None:
    config = KafkaSettings("k:1", {"linger.ms": "7"}).client(linger_ms=5, acks="all")
    assert (config["linger.ms"], config["acks"], config["bootstrap.servers"]) == ("7", "all", "k:1")


@pytest.mark.parametrize("given", [{}, {"reconnect.backoff.ms": "2000"}, {"reconnect.backoff.max.ms": "500"}], ids=str)
def test_a_client_connects_again_within_a_second_unless_the_user_says_otherwise(given: dict[str, str]) -> None:
    settings = KafkaSettings("k:1", given)
    config = settings.client()
    assert config.get("reconnect.backoff.max.ms") == (
        None if "reconnect.backoff.ms" in given else given.get("reconnect.backoff.max.ms", 1000)
    )
    Topics(settings)  # librdkafka accepts it
