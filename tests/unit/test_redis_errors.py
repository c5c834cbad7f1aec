import pytest
from redis import exceptions as redis
from redis._parsers.base import BaseParser

from persistence.errors import Corrupt, Terminal, Transient
from persistence.redis.errors import meaning_of

SCRIPT = "script: 5f2b, on @user_script:12."


@pytest.mark.parametrize(
    ("answer", "kind", "again", "says"),
    [
        ("LOADING Redis is loading the dataset in memory", Transient, True, "LOADING"),
        ("READONLY You can't write against a read only replica.", Transient, True, "replica"),
        (f"READONLY You can't write against a read only replica. {SCRIPT}", Transient, True, "replica"),
        ("OOM command not allowed when used memory > 'maxmemory'.", Terminal, True, "maxmemory"),
        (f"OOM command not allowed when used memory > 'maxmemory'. {SCRIPT}", Terminal, True, "maxmemory"),
        ("ERR Error running script (call to f_5f2b): @user_script:12: OOM command not allowed", Terminal, True, "OOM"),
        ("MISCONF Errors writing to the AOF file: No space left on device", Terminal, True, "disk"),
        ("MOVED 3999 127.0.0.1:6381", Transient, True, "moving slots"),
        ("ASK 3999 127.0.0.1:6381", Transient, True, "moving slots"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Transient, True, "moving slots"),
        ("CLUSTERDOWN Hash slot not served", Transient, True, "cluster"),
        ("MASTERDOWN Link with MASTER is down", Transient, True, "primary"),
        ("NOREPLICAS Not enough good replicas to write.", Transient, True, "replicas"),
        ("BUSY Redis is busy running a script.", Transient, True, "script"),
        ("NOSCRIPT No matching script.", Transient, True, "SCRIPT FLUSH"),
        ("NOAUTH Authentication required.", Terminal, False, "password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", Terminal, False, "wrong"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", Terminal, False, "Grant"),
        ("CROSSSLOT Keys in request don't hash to the same slot", Terminal, False, "redis+cluster://"),
        (f"WRONGTYPE Operation against a key holding the wrong kind of value {SCRIPT}", Corrupt, False, "another type"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'payload'", Terminal, False, "Lua"),
    ],
)
def test_what_a_server_answers_becomes_an_error_with_a_remedy(answer, kind, again, says):
    meaning = meaning_of(BaseParser.parse_error(answer))
    assert (meaning.kind, meaning.again) == (kind, again)
    text = str(meaning.error())
    assert says in text
    assert meaning.remedy
    assert "payload" not in text


@pytest.mark.parametrize(
    "error", [redis.ConnectionError("refused"), redis.TimeoutError("late"), ConnectionResetError(), BrokenPipeError()]
)
def test_a_lost_connection_is_transient_and_tried_again(error):
    meaning = meaning_of(error)
    assert (meaning.kind, meaning.again) == (Transient, True)
