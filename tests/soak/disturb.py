"""The disturbances: each does one thing to one target, and returns when the chain has recovered from it."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.soak.chain import DRIVER, Chain
from tests.soak.plan import Step
from tests.soak.servers import until
from tests.soak.services import Life
from tests.support import mission
from tests.support.proxy import Fault

TOPICS = {"orders": mission.ORDERS, "customers": mission.CUSTOMERS, "items": mission.ITEMS}
_NEEDLES = {"kafka": b"sales", "redis": b"EVALSHA", "cassandra": b"sales"}
"""What requests have in them that matter: scripts of states, and whatever names the flow."""
_ENDS = (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.HOLD_BEFORE, Fault.HOLD_AFTER, Fault.HALF_CLOSE)


_FENCED = ("has taken over", "Static consumer fenced")
"""What a run and a republisher say that find a newer one in their place."""
_HOURS = (1, -1, 0)
"""How far a clock is off, one after the other: it jumps by one hour, by two, and by one."""


@dataclass
class Told:
    """What came of a disturbance.

    Attributes:
        killed: When a service was killed, on the clock `time.monotonic`; None where none was.
        committed: When it had committed its first batch after that.
        notes: Counts of what else there is to say.
    """

    killed: float | None = None
    committed: float = 0.0
    notes: list[str] = field(default_factory=list)


def disturb(chain: Chain, step: Step, rng: random.Random) -> Told:
    """Do it, and wait until the chain has recovered."""
    target = "server" if step.target in chain.servers else "topic" if step.target in TOPICS else "service"
    work: Callable[[Chain, str, random.Random], Told] = _WORK[step.kind, target]
    return work(chain, step.target, rng)


def kill_service(chain: Chain, name: str, rng: random.Random) -> Told:
    """SIGKILL: to all of its processes, or to the first one while the JVM and the workers go on a moment longer."""
    seen = chain.manifest
    old = chain.services[name].kill(group=rng.random() < 0.5)
    began = time.monotonic()
    _await_commit(chain, name, old, seen)
    return Told(began, time.monotonic())


def zombie(chain: Chain, name: str, rng: random.Random) -> Told:
    """SIGSTOP, until a successor has committed; then it wakes, has to notice, and to end."""
    service, seen = chain.services[name], chain.manifest
    old = service.freeze()
    _await_commit(chain, name, old, seen)
    if old is None:
        return Told()
    old.signal(signal.SIGCONT)
    until(lambda: old.ended, 120, f"the end of the {name} that was frozen and overtaken")
    old.end()
    fenced = any(words in old.errors for words in _FENCED)
    return Told(notes=[f"{name} woken: {'fenced' if fenced else old.last_words}"])


def kill_server(chain: Chain, name: str, rng: random.Random) -> Told:
    """SIGKILL, and after a moment it is started again."""
    server = chain.servers[name]
    server.kill()
    time.sleep(rng.choice([0.0, 0.0, 1.0, 4.0]))
    server.start()
    return Told()


def freeze_server(chain: Chain, name: str, rng: random.Random) -> Told:
    """SIGSTOP for some seconds, now and then for longer than its clients wait for an answer."""
    server = chain.servers[name]
    server.signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.3, 6.0) if rng.random() < 0.8 else rng.uniform(10.0, 20.0))
    server.signal(signal.SIGCONT)
    return Told()


def fill(chain: Chain, name: str, rng: random.Random) -> Told:
    """The server's disk is full for some seconds; when it has ended or serves no more, it is started again."""
    server, disk = chain.servers[name], chain.servers[name].disk
    assert disk is not None
    disk.fill(server.pid)
    time.sleep(rng.uniform(4.0, 10.0))
    ended = not server.alive
    disk.free(server.pid)
    time.sleep(0.5)
    ready = server.is_ready
    if not ready:
        if server.alive:
            server.kill()
        server.start()
    state = "ended" if ended else "served on" if ready else "served no more"
    return Told(notes=[f"full disk ({disk.kind}): {name} {state}"])


def cut(chain: Chain, name: str, rng: random.Random) -> Told:
    """Connections are reset, refused, cut around a request, or held for some seconds."""
    proxy = chain.proxies[name]
    kind = rng.choice(["reset", "refuse", "fault", "fault", "fault"])
    if kind == "reset":
        proxy.cut()
    elif kind == "refuse":
        with proxy.refusing():
            time.sleep(rng.uniform(0.5, 4.0))
    else:
        met = proxy.arm(_NEEDLES[name], rng.choice(_ENDS), skip=rng.randrange(5))
        chain.until(met.is_set, f"a request to {name} that a fault can meet")
        time.sleep(rng.uniform(0.5, 8.0))
        proxy.release()
    return Told()


def grow(chain: Chain, name: str, rng: random.Random) -> Told:
    """One partition more, while messages flow."""
    topic = TOPICS[name]
    chain.until(lambda: _grown(chain, topic), f"a partition more of {topic}")
    return Told()


def recreate(chain: Chain, name: str, rng: random.Random) -> Told:
    """Delete a topic and create it again, when all that is in it has been read and nobody runs who reads or writes it.

    A client of librdkafka that runs meanwhile may never see the new topic: it takes the lower leader epochs for old news.
    """
    topic = TOPICS[name]
    services = {"orders": ["by_customer"], "customers": ["by_customer", "by_item"], "items": ["by_item", DRIVER]}
    with chain.without(*services[name]):
        partitions = chain.topics.partitions([topic])[topic]
        chain.topics.delete([topic])
        chain.topics.create(topic, partitions)
        if name == "items":  # whoever did it on purpose says so, once
            chain.driver.more = ("--accept", "topic-recreated")
    return Told()


def clock_of_service(chain: Chain, name: str, rng: random.Random) -> Told:
    """A process whose clock jumps an hour ahead and back while it works."""
    service = chain.services[name]
    clock = service.clock
    clock.set(0)
    service.environment = clock.environment
    _restarted(chain, name)
    for hours in _HOURS:
        clock.set(hours)
        life = service.life
        commits = life.commits if life else 0
        chain.until(
            lambda: service.life is not life or (life is not None and life.commits > commits + 2),
            f"commits of {name} whose clock is {hours:+} h off",
        )
    service.environment = {}
    _restarted(chain, name)
    return Told(notes=[f"clock jumps of {name}"] * 3)


def clock_of_server(chain: Chain, name: str, rng: random.Random) -> Told:
    """A server whose clock jumps an hour ahead and back while it serves."""
    server = chain.servers[name]
    server.kill()
    server.start(wrong_clock=True)
    for hours in _HOURS:
        server.set_clock(hours)
        seen = chain.manifest
        time.sleep(2.0)
        chain.until(lambda: _is_later(chain, seen), f"a batch while the clock of {name} is {hours:+} h off")
    server.kill()
    server.start()
    return Told(notes=[f"clock jumps of {name}"] * 3)


def _restarted(chain: Chain, name: str) -> None:
    seen = chain.manifest
    old = chain.services[name].kill(group=True)
    _await_commit(chain, name, old, seen)


def _await_commit(chain: Chain, name: str, old: Life | None, seen: Any) -> None:
    """Return when the successor of a process has committed its first batch."""
    service = chain.services[name]
    if name == DRIVER:
        chain.until(lambda: _is_later(chain, seen, other_epoch=True), "the first batch of a new driver")
    else:
        chain.until(
            lambda: service.life is not None and service.life is not old and service.life.commits,
            f"the first commit of a new {name}",
        )


def _is_later(chain: Chain, seen: Any, *, other_epoch: bool = False) -> bool:
    now = chain.manifest
    if now is None or seen is None:
        return now is not None and now.batch > 0
    return now.batch > seen.batch and (now.epoch > seen.epoch or not other_epoch)


def _grown(chain: Chain, topic: str) -> bool:
    partitions = chain.topics.partitions([topic])[topic]
    if partitions <= mission.PARTITIONS[topic]:
        chain.topics.add_partitions(topic, partitions + 1)
    return partitions > mission.PARTITIONS[topic]


_WORK: dict[tuple[str, str], Callable[[Chain, str, random.Random], Told]] = {
    ("kill", "service"): kill_service,
    ("zombie", "service"): zombie,
    ("kill", "server"): kill_server,
    ("freeze", "server"): freeze_server,
    ("fill", "server"): fill,
    ("cut", "server"): cut,
    ("grow", "topic"): grow,
    ("recreate", "topic"): recreate,
    ("clock", "service"): clock_of_service,
    ("clock", "server"): clock_of_server,
}
