"""The chain: servers, proxies before them, services with their supervisor, the feed, and what is known of all of them."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from aggregations.run.binding import bind
from jobs.stack import ports
from jobs.views import states
from persistence.errors import StoreError
from persistence.kafka import BrokerError, KafkaSettings, Topics
from persistence.manifest import Manifest
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.soak.orders import Sums
from tests.soak.servers import Server, SoakError, until
from tests.soak.services import Service
from tests.support import mission
from tests.support.proxy import Proxy
from tests.support.spark import FAST

DEAD = "mission.dead"
DRIVER = "driver"
REPUBLISHERS = ("by_customer", "by_item")
RECOVERY_SECONDS = 300.0
"""Longest that anything may take to work again."""
_KEYSPACE = "soak"
_CUT = "cut"


class Chain:
    """All processes of the soak.

    Args:
        home: Directory of everything; data that it has is gone on with.
        stores: Kinds of the stores of the first stage and of the second, `redis` or `cassandra`.
        disks: Every server gets a disk of its own, which can be made full.

    Attributes:
        servers: Servers by name.
        proxies: What services reach a server through.
        services: Services by name that are to run.
        driver: The service that runs the flow.
        topics: The broker, reached directly.
        kafka: The same as settings.
        manifest: The first stage's manifest as it was seen last.
        failures: What has gone wrong in the background.
    """

    def __init__(self, home: Path, stores: Sequence[str], *, disks: bool) -> None:
        self.home = home
        self.servers: dict[str, Server] = {}
        self.proxies: dict[str, Proxy] = {}
        self.services: dict[str, Service] = {}
        self.manifest: Manifest | None = None
        self._kinds, self._disks = stores, disks
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[str] = []

    def start(self) -> None:
        """Start the servers, create what is not there, and let the services run."""
        root = self.home / "servers"
        for name in dict.fromkeys(["kafka", *self._kinds]):
            options = {"properties": self._listeners(root)} if name == "kafka" else {}
            self.servers[name] = Server(name, root, own_disk=self._disks, **options)
            if name != "kafka":
                self.proxies[name] = Proxy(self.servers[name].endpoint)
        starts = [threading.Thread(target=self._guarded, args=(server.start,)) for server in self.servers.values()]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()
        self.check()
        self.kafka = KafkaSettings(self.servers["kafka"].address)
        self.topics = Topics(self.kafka, timeout=30)
        there = self.topics.names()
        for name, partitions in {**mission.PARTITIONS, DEAD: 1}.items():
            if name not in there:
                self.topics.create(name, partitions)
        if "cassandra" in self._kinds:
            from persistence.cassandra import apply_schema

            apply_schema(self._url("cassandra", direct=True))
        self.stores = self._bound(direct=True)
        self._define()
        for work in (self._supervise, self._watch):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), name=work.__name__))
            self._threads[-1].start()

    def stop(self) -> None:
        """End everything; data stays."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for service in self.services.values():
            service.stop()
        for proxy in self.proxies.values():
            proxy.close()
        for server in self.servers.values():
            server.stop()

    def check(self) -> None:
        """Raise what has gone wrong in the background."""
        refused = [service.refused for service in self.services.values() if service.refused]
        if refused or self.failures:
            raise SoakError("; ".join([*refused, *self.failures]))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what must happen in the end, whatever else is disturbed meanwhile.

        Raises:
            SoakError: It did not, or something else went wrong.
        """

        def met() -> object:
            self.check()
            try:
                return condition()
            except (BrokerError, StoreError):  # away just now
                return False

        until(met, RECOVERY_SECONDS, what)

    def drain(self) -> None:
        """Return when all that the feed has sent is folded and committed."""
        for republisher, topic in (("by_customer", mission.ORDERS), ("by_item", mission.CUSTOMERS)):
            self.until(functools.partial(self._passed_on, republisher, topic), f"{republisher} at the end of {topic}")
        self.until(self._folded, f"the flow at the end of {mission.ITEMS}")

    def states(self, stage: str) -> Sums:
        """Every state of a stage."""
        return {view.key: view.state for view in states(mission.sales, stage, self.stores) if view.state is not None}

    def offsets(self) -> dict[int, int]:
        """Ends of the topic of orders by partition."""
        return {partition: one.high for (_, partition), one in self.topics.marks([mission.ORDERS]).items()}

    def dead_letters(self) -> int:
        """Records that nobody could use; there is no reason for any."""
        return sum(one.high for one in self.topics.marks([DEAD]).values())

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """These services are stopped as long as the block runs."""
        stopped = {name: self.services[name] for name in names}
        self.services = {name: service for name, service in self.services.items() if name not in names}
        for service in stopped.values():
            service.stop()
        try:
            yield
        finally:
            self.services |= stopped

    def _passed_on(self, group: str, topic: str) -> bool:
        committed = self.topics.group_offsets(group, [topic])
        return all(committed.get(place, 0) >= one.high for place, one in self.topics.marks([topic]).items())

    def _folded(self) -> bool:
        manifest, topic = self.manifest, mission.ITEMS
        if manifest is None or manifest.topic_ids.get(topic) != self.topics.topic_ids([topic])[topic]:
            return all(one.high == 0 for one in self.topics.marks([topic]).values())
        positions = manifest.positions.get(topic, {})
        return all(
            partition in positions and positions[partition].next_offset >= one.high
            for (_, partition), one in self.topics.marks([topic]).items()
            if one.high
        )

    def _define(self) -> None:
        bootstrap = f"{ports.LOOPBACK}:{self.proxies['kafka'].port}"
        hops = {"by_customer": (mission.ORDERS, mission.CUSTOMERS, "json"),
                "by_item": (mission.CUSTOMERS, mission.ITEMS, "envelope")}  # fmt: skip
        for name, (source, target, kind) in hops.items():
            command = (
                *("republish", f"tests.support.mission:{name}", "--from", source, "--to", target, "--input", kind),
                *("--via", name, "--instance", name, "--dead-letters", DEAD, "--bootstrap", bootstrap, "--json"),
            )
            self.services[name] = Service(name, command, self.home)
            self.services[name].accepts = ("grown-undrained",)  # a topic grows by one partition behind a backlog
        self.driver = self.services[DRIVER] = Service(
            DRIVER,
            (
                *("run", "tests.support.mission:sales", "--dead-letters", DEAD, "--bootstrap", bootstrap, "--json"),
                *(text for stage, url in self._bound(direct=False).items() for text in ("--store", f"{stage}={url}")),
                *(("--accept", "replication-1") if "cassandra" in self._kinds else ()),
                *("--trigger", "200ms"),
                *(text for name, value in FAST.items() for text in ("--conf", f"{name}={value}")),
            ),
            self.home,
        )
        # A topic grows by one partition behind a backlog. Nobody reads in order what the flow publishes.
        self.driver.accepts = ("grown-undrained",)

    def _bound(self, *, direct: bool) -> dict[str, str]:
        pairs = zip(mission.sales.stages, self._kinds, strict=True)
        return bind(mission.sales, {stage.name: self._url(kind, direct=direct) for stage, kind in pairs})

    def _url(self, kind: str, *, direct: bool) -> str:
        port = self.servers[kind].endpoint[1] if direct else self.proxies[kind].port
        where = f"{_KEYSPACE}?replication=1" if kind == "cassandra" else "0"
        return f"{kind}://{ports.LOOPBACK}:{port}/{where}"

    def _listeners(self, root: Path) -> dict[str, str]:
        """Beside its own listener the broker gets one that it announces at a proxy's port."""
        home = root / "kafka"
        (home / _CUT).mkdir(parents=True, exist_ok=True)
        from jobs.stack import kafka

        own = ports.remembered(home, kafka.PORTS)
        cut = ports.remembered(home / _CUT, (_CUT,))[_CUT]
        self.proxies["kafka"] = Proxy((ports.LOOPBACK, cut))
        plain = f"PLAINTEXT://{ports.LOOPBACK}:{own['client']}"
        return {
            "listeners": f"{plain},CUT://{ports.LOOPBACK}:{cut},CONTROLLER://{ports.LOOPBACK}:{own['controller']}",
            "advertised.listeners": f"{plain},CUT://{ports.LOOPBACK}:{self.proxies['kafka'].port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CUT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            # A broker that was killed is admitted again when its previous registration expires, by default after 9 s.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
        }

    def _supervise(self) -> None:
        while not self._closing.wait(0.1):
            for service in list(self.services.values()):
                service.tend()

    def _watch(self) -> None:
        """Read the manifest of the first stage's store, as it is the last one to be written."""
        url = self.stores[mission.sales.stages[0].name]
        with closing(open_store(f"{url}{'&' if '?' in url else '?'}retry_for=1")) as store:
            while not self._closing.wait(0.1):
                try:
                    self.manifest = store.load_manifest(FlowRef(mission.sales.name, 1))
                except StoreError:
                    time.sleep(0.2)

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self.failures.append(f"{type(error).__name__}: {error}")
