"""The Lua scripts, one file each, called by the SHA-1 of their text."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its SHA-1, under which a server caches it."""

    name: str
    text: bytes
    sha: str


def _read(name: str) -> Script:
    text = files(__name__).joinpath(f"{name}.lua").read_bytes()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


SAVE: Final = _read("save")
COUNTS: Final = _read("counts")
ACQUIRE: Final = _read("acquire")
INSTALL: Final = _read("install")
MANIFEST: Final = _read("manifest")
SCAN: Final = _read("scan")
REMOVE: Final = _read("remove")
ALL: Final = (SAVE, COUNTS, ACQUIRE, INSTALL, MANIFEST, SCAN, REMOVE)
