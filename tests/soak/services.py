"""The services of the soak, and their supervisor, which restarts processes that have ended."""

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
"""By default clients check for added partitions every five minutes, which is too long for the soak."""
REFUSED = (2, 3)
"""Exit codes that a restart does not fix: wrong usage, and a run that was refused as unsafe."""


class Life:
    """One process of a service, in its own session so that its children can be signalled.

    Attributes:
        commits: Number of commits that it has reported.
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
        """Whether the process has ended. Only `end` reaps it, so its process group id is not reused before."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def signal(self, number: signal.Signals, *, group: bool = True) -> None:
        """Send a signal to all of its processes, or to the first one alone."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def end(self) -> int:
        """End its remaining processes, and return the exit code of the first one."""
        self.signal(signal.SIGKILL)
        return self._process.wait()

    @property
    def errors(self) -> str:
        """Its standard error."""
        return self._log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The last line of its standard error."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError):  # the last line of a killed process may be incomplete
                report = json.loads(line)
                if not report.keys() & {"plan", "done", "refused"}:
                    self._on_line(report)
                    self.commits += 1


class Service:
    """A service that should always run.

    Args:
        name: Its name.
        command: Arguments of `headwater`.
        home: Directory of its log and scratch files.

    Attributes:
        exits: Counts of unplanned ends, by exit code and last line.
        verdicts: Sums of the counts that it reported with its commits.
        more: Arguments for the next start only.
        accepts: Risks that the operator accepts if a start is refused because of them.
        environment: Added to its environment from the next start on.
        refused: Why it was refused as unsafe; empty if it was not.
        clock: Its clock, which can be changed.
    """

    def __init__(self, name: str, command: Sequence[str], home: Path) -> None:
        self.name = name
        self.exits: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
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
        """Start it if it is not running."""
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
        """SIGKILL to all its processes, or to the first one alone; the others then end by themselves."""
        with self._lock:
            life = self.life
            if life is not None:
                life.killed = True
                life.signal(signal.SIGKILL, group=group)
            return life

    def freeze(self) -> Life | None:
        """SIGSTOP to all its processes, and start a successor."""
        with self._lock:
            life = self.life
            if life is not None:
                life.signal(signal.SIGSTOP)
                self._start()
            return life

    def sweep(self) -> None:
        """End the remaining children of killed processes."""
        with self._lock:
            while self._ended:
                self._ended.pop().end()

    def stop(self) -> None:
        """End it gracefully, with all its processes."""
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
                self.verdicts[f"{stage} {verdict}"] += count
