"""Converts errors of the driver to store errors."""

from typing import Any, Final

from cassandra import (
    AuthenticationFailed,
    InvalidRequest,
    OperationTimedOut,
    ReadFailure,
    ReadTimeout,
    RequestValidationException,
    Unauthorized,
    Unavailable,
    UnresolvableContactPoints,
    UnsupportedOperation,
    WriteFailure,
    WriteTimeout,
)
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ProtocolVersionUnsupported
from cassandra.protocol import (
    BadCredentials,
    ErrorMessage,
    OverloadedErrorMessage,
    SyntaxException,
)
from cassandra.protocol import RequestValidationException as RefusedRequest

from persistence.errors import StoreError, Terminal, Transient
from persistence.names import FlowRef, StageRef

SCHEMA_REMEDY: Final = "Create the keyspace and its tables: headwater schema apply URL"
FOREIGN_REMEDY: Final = (
    "The tables are not those of this version: add the missing columns with `headwater schema apply URL`, or choose "
    "another keyspace if they belong to another program"
)

_LOGIN = "Check the user in the URL and the secret in password_file or password_env"
_RIGHTS = "GRANT SELECT and MODIFY on the keyspace to this user (and CREATE for `headwater schema apply`)"
_REACH = "Check that the cluster is running, and check hosts, ports and the option tls in the URL"
_REPLICAS = "Start the nodes that are down; a quorum of each state's copies must be up"
_BUSY = "The cluster is slow or overloaded: check its log; raise timeout only if this is normal for it"
_TLS = (
    "Check tls_ca and tls_cert; certificates must contain the nodes' IP addresses, or set tls_hostname=ignore "
    "to trust every certificate of that authority"
)
_VERSION = "headwater needs Cassandra 4.0 or newer"

# Texts of a server for a missing keyspace, table or column; there is no error code for them.
_MISSING = ("does not exist", "unconfigured table")
_FOREIGN = ("Undefined column", "Unknown identifier")
# TLS errors that a retry does not fix, by OpenSSL's names; the driver wraps them in an OSError.
_TLS_ERRORS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "_ALERT_")


def translate(error: BaseException, place: str, ref: FlowRef | StageRef | None = None) -> StoreError:
    """Return the store error for `error`. It quotes no bound value, since the driver's texts contain none."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, NoHostAvailable):
        return _no_host(error, place, ref)
    what = f"{_reason(error)} ({place})"
    if isinstance(error, (AuthenticationFailed, BadCredentials)):
        return Terminal(f"the login was refused ({place})", _LOGIN, ref=ref)
    if isinstance(error, Unauthorized):
        return Terminal(what, _RIGHTS, ref=ref)
    if isinstance(error, (InvalidRequest, SyntaxException, RequestValidationException, RefusedRequest)):
        return Terminal(what, _schema_remedy(str(error)), ref=ref)
    if isinstance(error, OSError) and any(name in str(error) for name in _TLS_ERRORS):
        return Terminal(what, _TLS, ref=ref)
    if isinstance(error, (ProtocolVersionUnsupported, UnsupportedOperation)):
        return Terminal(what, _VERSION, ref=ref)
    if isinstance(error, UnresolvableContactPoints):
        return Transient(f"none of the hosts has an address ({place})", _REACH, ref=ref)
    if isinstance(error, Unavailable):
        return Transient(what, _REPLICAS, ref=ref)
    if isinstance(error, (OperationTimedOut, ReadTimeout, WriteTimeout, ReadFailure, WriteFailure)):
        return Transient(what, _BUSY, ref=ref)
    if isinstance(error, OverloadedErrorMessage):
        return Transient(what, _BUSY, ref=ref)
    # The others are temporary: lost connections, and codes for bootstrapping, truncating or an unknown outcome.
    return Transient(what, ref=ref)


def _schema_remedy(text: str) -> str:
    if any(phrase in text for phrase in _MISSING):
        return SCHEMA_REMEDY
    if any(phrase in text for phrase in _FOREIGN):
        return FOREIGN_REMEDY
    return "See the server's log"


def _no_host(error: Any, place: str, ref: FlowRef | StageRef | None) -> StoreError:
    """The error after every host failed: a permanent reason of one host takes precedence."""
    causes = list(error.errors.values()) if isinstance(error.errors, dict) else list(error.errors or ())
    translated = [translate(cause, place, ref) for cause in causes if isinstance(cause, Exception)]
    for one in translated:
        if isinstance(one, Terminal):
            return one
    reasons = sorted({_reason(cause) for cause in causes if isinstance(cause, Exception)})
    return Transient(f"no host can be reached: {', '.join(reasons) or 'all are down'} ({place})", _REACH, ref=ref)


def _reason(error: BaseException) -> str:
    """Short text of an error: the server's message, or else the error's type."""
    if isinstance(error, OperationTimedOut):
        return "a request was not answered in time"
    if isinstance(error, ErrorMessage):
        return f"{error.summary}: {error.message}"
    if isinstance(error, (Unavailable, ReadTimeout, WriteTimeout, ReadFailure, WriteFailure)):
        counts = [getattr(error, name, None) for name in ("received_responses", "required_responses")]
        answered = f", {counts[0]} of {counts[1]} copies answered" if None not in counts else ""
        return f"{type(error).__name__}{answered}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
