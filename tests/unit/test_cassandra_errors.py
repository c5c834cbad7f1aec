import pickle

import cassandra
import pytest
from cassandra import ConsistencyLevel, WriteType, protocol
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionShutdown

from persistence.cassandra.errors import translate
from persistence.errors import StoreError, Terminal, Transient
from persistence.protocol import FlowRef

STAGE = FlowRef("fleet").stage("aircraft")
QUORUM = ConsistencyLevel.LOCAL_QUORUM


def code(kind, number, text=""):
    return kind(code=number, message=text, info=None)


TRANSIENT = [
    cassandra.OperationTimedOut(),
    cassandra.WriteTimeout(
        "timed out", consistency=QUORUM, received_responses=1, required_responses=2, write_type=WriteType.CAS
    ),
    cassandra.ReadTimeout("timed out", consistency=QUORUM, received_responses=0, required_responses=2),
    cassandra.Unavailable("not enough", consistency=QUORUM, required_replicas=2, alive_replicas=1),
    code(protocol.OverloadedErrorMessage, 0x1001),
    code(protocol.IsBootstrappingErrorMessage, 0x1002),
    code(protocol.ServerError, 0x0000, "something broke"),
    code(protocol.ErrorMessage, 0x1700, "CAS operation result is unknown"),
    ConnectionShutdown("closed"),
    ConnectionResetError(104, "Connection reset by peer"),
    NoHostAvailable("Unable to connect", {"127.0.0.1": ConnectionRefusedError(111, "refused")}),
    NoHostAvailable("Unable to complete the operation against any hosts", {}),
    cassandra.UnresolvableContactPoints({}),
]
TERMINAL = {
    "headwater schema apply": [
        cassandra.InvalidRequest('message="Keyspace fleet does not exist"'),
        cassandra.InvalidRequest('message="table state does not exist"'),
        cassandra.InvalidRequest('message="unconfigured table state"'),
        cassandra.InvalidRequest('message="Undefined column name indexed in table fleet.flow"'),
    ],
    "another keyspace": [cassandra.InvalidRequest('message="Undefined column name fence in table fleet.state"')],
    "password_file": [
        cassandra.AuthenticationFailed("Failed to authenticate"),
        NoHostAvailable("Unable to connect", {"127.0.0.1": cassandra.AuthenticationFailed("Bad credentials")}),
    ],
    "GRANT": [cassandra.Unauthorized("User app has no MODIFY permission")],
    "tls_ca": [
        NoHostAvailable(
            "", {"h": OSError(1, "Last error: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")}
        ),
        OSError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
    ],
    "Cassandra 4.0": [NoHostAvailable("", {"127.0.0.1": cassandra.UnsupportedOperation("v5")})],
    "log": [code(protocol.SyntaxException, 0x2000, "no viable alternative")],
}


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_what_may_work_again_is_transient(error):
    translated = translate(error, "h:9042/fleet", STAGE)
    assert type(translated) is Transient
    assert translated.remedy
    assert "h:9042/fleet" in str(translated)
    assert "stage aircraft" in str(translated)


@pytest.mark.parametrize(
    ("remedy", "error"),
    [(remedy, error) for remedy, errors in TERMINAL.items() for error in errors],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_will_not_work_again_is_terminal_with_its_remedy(remedy, error):
    translated = translate(error, "h:9042/fleet", STAGE)
    assert type(translated) is Terminal
    assert remedy in translated.remedy


def test_a_login_that_one_host_refuses_counts_more_than_another_that_is_down():
    error = NoHostAvailable("", {"a": ConnectionRefusedError(), "b": cassandra.AuthenticationFailed("no")})
    assert "login was refused" in str(translate(error, "a,b/fleet"))


def test_the_copies_that_answered_are_told():
    assert "1 of 2 copies answered" in str(translate(TRANSIENT[1], "h/fleet"))


def test_a_store_error_passes_unchanged():
    error = Terminal("the file is missing")
    assert translate(error, "h/fleet") is error


def test_translated_errors_survive_pickling():
    for error in TRANSIENT:
        copy = pickle.loads(pickle.dumps(translate(error, "h/fleet", STAGE)))
        assert isinstance(copy, StoreError)
        assert str(copy) == str(translate(error, "h/fleet", STAGE))
