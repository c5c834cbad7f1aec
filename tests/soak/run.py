"""Round after round: disturb, recover, drain, compare."""

import random
import sys
import threading
import time
from pathlib import Path

from tests.soak import check
from tests.soak.chain import Chain
from tests.soak.clock import Clock
from tests.soak.disturb import Told, disturb
from tests.soak.orders import Feed
from tests.soak.plan import Step, amounts, rounds
from tests.soak.report import Soak, log

_ROUND_SECONDS = 60
"""About how long a round takes: what is sent a second follows from it."""


def soak(plan: Soak, home: Path, minutes: float) -> Soak:
    """Go on with a soak for some minutes, or until it is done.

    Args:
        plan: What is to be done, if the directory has no soak that was begun.
        home: Directory of data, logs and the report.
        minutes: Begin no round after that time.

    Returns:
        The soak, as it is in the report.
    """
    home.mkdir(parents=True, exist_ok=True)
    this = Soak.load(home) or plan
    if this.finished or this.violations:
        return this
    return _Run(this, home, time.monotonic() + minutes * 60).run()


class _Run:
    def __init__(self, this: Soak, home: Path, deadline: float) -> None:
        self.this, self.home, self.deadline = this, home, deadline
        wanted = amounts(this.kills, ["kafka", *this.stores], clock=Clock.is_possible())
        self.planned = rounds(this.seed, wanted)
        this.wanted = {str(step): count for step, count in wanted.items()}
        this.rounds = len(self.planned)
        this.skipped = [] if Clock.is_possible() else ["clock jumps: there is no C compiler (cc)"]
        self.chain = Chain(home, this.stores, disks=any(step.kind == "fill" for step in wanted))
        self.before: dict[str, int] = {}
        self.outages: list[float] = []  # when those of servers ended in this round
        self._feed: Feed | None = None
        self._lock = threading.Lock()

    def run(self) -> Soak:
        this, began = self.this, time.monotonic()
        try:
            self.chain.start()
            since = {int(partition): offset for partition, offset in this.since.items()}
            self._feed = Feed(self.chain.kafka, seed=this.seed, keys=this.keys, sent=this.sent, since=since)
            self._rounds()
            if this.done == this.rounds and not this.violations:
                self._finish()
        except Exception as error:
            if not this.violations:
                this.violations.append(f"round {this.done + 1}: {type(error).__name__}: {error}")
            if not isinstance(error, AssertionError):
                raise
        finally:
            if self._feed is not None:
                self._feed.abandon()
            self.chain.stop()
            for service in self.chain.services.values():
                this.exits.update(service.exits)
                this.verdicts.update(service.told)
            this.minutes += (time.monotonic() - began) / 60
            this.save(self.home)
        return this

    @property
    def feed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    def _rounds(self) -> None:
        this = self.this
        self.feed.send(1000)
        self._resolve("exact after a start")
        rate = max(this.messages // this.rounds // _ROUND_SECONDS, 10)
        while this.done < this.rounds and not this.violations and time.monotonic() < self.deadline:
            self._round(self.planned[this.done], rate)

    def _round(self, steps: list[Step], rate: int) -> None:
        this, began = self.this, time.monotonic()
        quiet = any(step.kind == "recreate" for step in steps)
        if not quiet:
            self.feed.open(rate)
        told: dict[Step, Told] = {}
        self.outages.clear()
        threads = [threading.Thread(target=self._step, args=(step, told), name=str(step)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.chain.check()
        self.feed.close()
        if quiet:
            self.feed.send(rate)
        self._resolve("exact after a round")
        for step, one in told.items():
            this.counts[str(step)] += 1
            this.notes.update(one.notes)
            if one.killed is not None:
                ends = [end for end in self.outages if one.killed < end < one.committed]
                for found, since in (
                    (this.seconds_to_commit, one.killed),
                    (this.seconds_behind_outages, max([one.killed, *ends])),
                ):
                    found.setdefault(step.target, []).append(round(one.committed - since, 2))
        this.done += 1
        this.save(self.home)
        line = f"round {this.done} of {this.rounds}: {', '.join(map(str, steps))}: {time.monotonic() - began:.0f} s"
        log(self.home, line)
        print(line, file=sys.stderr, flush=True)

    def _step(self, step: Step, told: dict[Step, Told]) -> None:
        rng = random.Random(f"{self.this.seed} {self.this.done} {step}")
        try:
            time.sleep(rng.uniform(0, 3))  # a moment that nothing in the chain has chosen
            log(self.home, f"{step} begins")
            told[step] = disturb(self.chain, step, rng)
            log(self.home, f"{step} has ended")
            if step.target in self.chain.servers:
                self.outages.append(time.monotonic())
            if step.target in self.chain.services:
                with self._lock:
                    self._bounds()
        except BaseException as error:
            self.chain.failures.append(f"{step}: {type(error).__name__}: {error}")

    def _bounds(self) -> None:
        wrong: list[str] = []

        def look() -> bool:
            wrong[:] = check.bounds(self.chain, self.feed.truth, self.before)
            return True

        self.chain.until(look, "a look at the states")
        self._judge(wrong, "never above the fold of what was sent, after a restart")

    def _resolve(self, what: str) -> None:
        """Wait until everything is folded, and compare."""
        self.chain.drain()
        self._judge(check.exact(self.chain, self.feed.truth), what)
        for service in self.chain.services.values():
            service.sweep()
        self.this.sent, self.this.items = self.feed.sent, self.feed.truth.items
        self.this.since = {str(partition): offset for partition, offset in self.chain.offsets().items()}

    def _judge(self, wrong: list[str], what: str) -> None:
        if wrong:
            self.this.violations += [f"round {self.this.done + 1}: {line}" for line in wrong]
            raise AssertionError(wrong[0])
        self.this.checks[what] += 1

    def _finish(self) -> None:
        """What is left of the orders, and the last comparison."""
        left = self.this.messages - self.feed.sent
        if left > 0:
            self.feed.send(left)
        self._resolve("exact at the end")
        self.this.finished = True
