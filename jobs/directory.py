"""`headwater.toml`: settings for the commands of one directory; options and the environment override them.

```toml
store = "redis://redis:6379"              # for all flows of this directory

[kafka]                                   # as in the file of --kafka-settings
bootstrap = "broker:9092"

[flows.fleet]                             # by the flow's name
generation = 2
dead_letters = "fleet.dead"
journal = "fleet.journal"
journal_share = 0.1                       # of all events; without it, 1.0
stores.carrier = "cassandra://a,b/fleet"  # of one stage; `store` is for all stages of the flow
```
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, Self
from urllib.parse import urlsplit

from jobs.environment import UsageError
from persistence.names import MAX_GENERATION

FILE: Final = "headwater.toml"
_FLOW: Final[Mapping[str, type]] = {
    "store": str,
    "stores": dict,
    "dead_letters": str,
    "journal": str,
    "journal_share": float,
    "generation": int,
}


class DirectoryError(UsageError):
    """`headwater.toml` cannot be used; the text names file and line."""


@dataclass(frozen=True, slots=True)
class FlowDefaults:
    """Settings of one flow in `headwater.toml`.

    Attributes:
        stores: URL of the store by stage name; the empty name is for all other stages.
        dead_letters: The dead-letter topic.
        generation: Generation of the states.
        journal: Topic of the journal.
        journal_share: Share of the events that it lists.
    """

    stores: Mapping[str, str] = field(default_factory=dict)
    dead_letters: str | None = None
    generation: int | None = None
    journal: str | None = None
    journal_share: float | None = None


@dataclass(frozen=True, slots=True)
class Directory:
    """The content of one `headwater.toml`; empty when there is no such file.

    Attributes:
        path: The file.
        kafka: Its table `[kafka]`; None when it has none.
    """

    path: Path = Path(FILE)
    kafka: Mapping[str, Any] | None = None
    _store: str = ""
    _flows: Mapping[str, FlowDefaults] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = Path(FILE)) -> Self:
        """Read the file.

        Raises:
            DirectoryError: It is unreadable, or contains an unknown key or an invalid value.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise DirectoryError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DirectoryError(f"{path} cannot be read: it is not UTF-8") from error
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:  # its text has the line and no value
            raise DirectoryError(f"{path} is not valid TOML: {error}") from None
        reader = _Reader(path, text)
        reader.check(table, {"store": str, "kafka": dict, "flows": dict})
        flows = {name: reader.flow(name, flow) for name, flow in table.get("flows", {}).items()}
        return cls(path, table.get("kafka"), reader.url(table, "store"), flows)

    def of(self, flow: str) -> FlowDefaults:
        """Settings of a flow in the file."""
        found = self._flows.get(flow, FlowDefaults())
        stores = {"": self._store, **found.stores} if self._store else found.stores
        return FlowDefaults(stores, found.dead_letters, found.generation, found.journal, found.journal_share)


class _Reader:
    """Checks the tables of one file, and finds the line of each key."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def flow(self, name: str, table: Any) -> FlowDefaults:
        self.check({name: table}, {name: dict}, "flows")
        self.check(table, _FLOW, "flows", name)
        stages = table.get("stores", {})
        self.check(stages, dict.fromkeys(stages, str), "flows", name, "stores")
        urls = {stage: self.url(stages, stage, "flows", name, "stores") for stage in stages}
        if (generation := table.get("generation")) is not None and not 1 <= generation <= MAX_GENERATION:
            self._refuse(f"a generation is a number from 1 to {MAX_GENERATION}", "flows", name, "generation")
        if url := self.url(table, "store", "flows", name):
            urls = {"": url, **urls}
        if (share := table.get("journal_share")) is not None and not 0 < share <= 1:
            self._refuse("a share of events is above 0 and at most 1.0", "flows", name, "journal_share")
        return FlowDefaults(urls, table.get("dead_letters"), generation, table.get("journal"), share)

    def check(self, table: Mapping[str, Any], known: Mapping[str, type], *path: str) -> None:
        """Refuse unknown keys, and values of another type."""
        for key, value in table.items():
            if key not in known:
                self._refuse(f"unknown setting {key!r}; choose from {', '.join(known)}", *path, key)
            if type(value) is not known[key]:
                names = {str: "a string", int: "an integer", float: "a decimal number", dict: "a table"}
                self._refuse(f"{key!r} must be {names[known[key]]}", *path, key)

    def url(self, table: Mapping[str, str], key: str, *path: str) -> str:
        """A store's URL; one with a password belongs elsewhere."""
        url = table.get(key, "")
        try:
            parts = urlsplit(url)
        except ValueError:
            self._refuse(f"{key!r} is not the URL of a store", *path, key)
        if key in table and not (parts.scheme and "://" in url):
            self._refuse(f"{key!r} is not the URL of a store: write for example redis://host:6379", *path, key)
        if parts.password:
            self._refuse(f"the URL of {key!r} has a password: name a file with password_file=...", *path, key)
        return url

    def _refuse(self, why: str, *path: str) -> NoReturn:
        raise DirectoryError(f"{self._path}, line {self._line(path)}: {why}")

    def _line(self, path: tuple[str, ...]) -> int:
        """The first line with the last name of a key's path, after the lines with the names before it."""
        at = 0
        for name in path:
            written = re.compile(rf"""[^#=]*(?<![\w-])["']?{re.escape(name)}["']?\s*[\].=]""")
            at = next((i for i, line in self._from(at) if written.match(line)), at)
        return at + 1

    def _from(self, start: int) -> Iterator[tuple[int, str]]:
        return ((i, line) for i, line in enumerate(self._lines) if i >= start)
