"""The services of the soak, and what a supervisor does for them: a process that has ended is started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from persistence.commit.faults import SPEC
from tests.soak.clock import Clock
from tests.soak.report import log

ROOT = Path(__file__).parents[2]
_BACKOFF_SECONDS = 1.0
_ENVIRONMENT = {"HEADWATER_KAFKA_TOPIC_METADATA_REFRESH_INTERVAL_MS": "5000"}
"""Clients look for added partitions every five minutes; the soak has no time to wait for that."""
REFUSED = (2, 3)
"""Exit codes of what no new start mends: a command that makes no sense, and a run that was refused as unsafe."""


class Life:
    """One process of a service, in a session of its own so that all it starts can be reached.

    Attributes:
        commits: Commits that it has told of.
        killed: It was ended on purpose.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        on_line: Callable[[dict[str, Any]], None],
    ) -> None:
        self.began = time.monotonic()
        self.commits = 0
        self.killed = False
        self._log, self._on_line = log, on_line
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", *command],
                cwd=ROOT,
                env={**os.environ, SPEC: "", "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped before `end`: until then its group's number is its own."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def signal(self, number: signal.Signals, *, group: bool = True) -> None:
        """Send a signal to all of its processes, or to the first one alone."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def end(self) -> int:
        """End what is left of it, and return the exit code of its first process."""
        self.signal(signal.SIGKILL)
        return self._process.wait()

    @property
    def errors(self) -> str:
        """What it wrote to its standard error."""
        return self._log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The last line of it."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError):  # a killed process may tear its last line
                told = json.loads(line)
                if not told.keys() & {"plan", "done", "refused"}:
                    self._on_line(told)
                    self.commits += 1


class Service:
    """A service that is always to run.

    Args:
        name: Its name.
        command: Arguments of `headwater`.
        home: Where its log and its scratch files are.

    Attributes:
        exits: How it ended when nobody had ended it: by exit code and last line.
        told: Sums of the counts that it told of with its commits.
        more: Arguments for the next start only.
        accepts: Risks that whoever runs it accepts when a start is refused because of them.
        environment: Added to its environment from the next start on.
        refused: Why it was refused as unsafe; empty when it was not.
        clock: What it can be made to believe in.
    """

    def __init__(self, name: str, command: Sequence[str], home: Path) -> None:
        self.name = name
        self.exits: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.more: Sequence[str] = ()
        self.accepts: Sequence[str] = ()
        self.environment: dict[str, str] = {}
        self.refused = ""
        self.clock = Clock(home / f"{name}.clock")
        self._command = command
        self._home = home
        self._logs = home / "logs"
        self._logs.mkdir(exist_ok=True)
        self._scratch = home / "tmp"
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._ended: list[Life] = []
        self.life: Life | None = None

    def tend(self) -> None:
        """Start it when it does not run."""
        with self._lock:
            if self.refused:
                return
            if self.life is not None and self.life.ended:
                if not self.life.killed:
                    if time.monotonic() - self.life.began < _BACKOFF_SECONDS:
                        return
                    self._note(self.life)
                    self.life.end()
                else:
                    self._ended.append(self.life)
                self.life = None
            if self.life is None and not self.refused:
                self._start()

    def kill(self, *, group: bool) -> Life | None:
        """SIGKILL to all of its processes, or to the first one alone: then the rest ends when it notices."""
        with self._lock:
            life = self.life
            if life is not None:
                life.killed = True
                life.signal(signal.SIGKILL, group=group)
            return life

    def freeze(self) -> Life | None:
        """SIGSTOP to all of its processes, and a successor in its place."""
        with self._lock:
            life = self.life
            if life is not None:
                life.signal(signal.SIGSTOP)
                self._start()
            return life

    def sweep(self) -> None:
        """End what killed processes left behind."""
        with self._lock:
            while self._ended:
                self._ended.pop().end()

    def stop(self) -> None:
        """End it gracefully, and all that is left of it."""
        with self._lock:
            if self.life is not None:
                life, self.life = self.life, None
                life.killed = True
                life.signal(signal.SIGTERM, group=False)
                deadline = time.monotonic() + 20
                while not life.ended and time.monotonic() < deadline:
                    time.sleep(0.05)
                life.end()
        self.sweep()

    def _start(self) -> None:
        environment = {"TMPDIR": str(self._scratch), **_ENVIRONMENT, **self.environment}
        logs = self._logs / f"{self.name}-{len(list(self._logs.glob(f'{self.name}-*')))}.log"
        self.life = Life([*self._command, *self.more], logs, environment, self._add)
        self.more = ()
        log(self._home, f"{self.name} starts, see {logs.name}")

    def _note(self, life: Life) -> None:
        status = os.waitid(os.P_PID, life._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        code = status.si_status if status else 0
        line = life.last_words
        self.exits[f"{self.name}, exit code {code}: {line[:160]}"] += 1
        log(self._home, f"{self.name} ended by itself, exit code {code}: {line}")
        accepted = [risk for risk in self.accepts if f"--accept {risk}" in life.errors]
        if code in REFUSED and accepted:
            self.more = [text for risk in accepted for text in ("--accept", risk)]
        elif code in REFUSED:
            self.refused = f"{self.name} was refused: {line}"

    def _add(self, line: dict[str, Any]) -> None:
        for stage, counts in line.get("verdicts", {}).items():
            for verdict, count in counts.items():
                self.told[f"{stage} {verdict}"] += count
