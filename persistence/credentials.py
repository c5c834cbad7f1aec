"""Secrets of store URLs: a URL names where a secret is kept, and never contains the secret itself."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persistence.errors import InvalidUrl
from persistence.urls import redact


@dataclass(frozen=True, slots=True)
class Secret:
    """Where a secret is kept: a file, or an environment variable. It is read when it is needed."""

    file: Path | None = None
    variable: str = ""

    def read(self) -> str:
        """Return the secret.

        Raises:
            InvalidUrl: The file or the variable is missing.
        """
        if self.file is None:
            value = os.environ.get(self.variable)
            if value is None:
                raise InvalidUrl(f"the variable {self.variable} is not set", "Set it to the secret")
            return value
        try:
            return self.file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidUrl(f"the file {self.file} cannot be read: {reason}", "Write the secret to it") from error


def referred(url: str, given: dict[str, Any], name: str) -> Secret | None:
    """Remove `NAME_file` (a path) or `NAME_env` (a variable) from a URL's options and return it.

    Args:
        url: The URL, for the error.
        given: Its parsed options; the option is removed.
        name: Name of the secret.

    Raises:
        InvalidUrl: Both are given.
    """
    file, variable = given.pop(f"{name}_file", None), given.pop(f"{name}_env", "")
    if file and variable:
        raise InvalidUrl(f"{redact(url)} names both {name}_file and {name}_env", "Keep one of them")
    return Secret(file, variable) if file or variable else None
