"""Findings of a preflight, made before a flow runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that can lose states or cost time.

    Attributes:
        risk: Short name, the same in every run: the argument of `--accept`.
        what: What was found, and where.
        remedy: What to change.
        unsafe: It can cause states to be lost or doubled; otherwise it costs availability or speed.
    """

    risk: str
    what: str
    remedy: str
    unsafe: bool = False

    def __str__(self) -> str:
        return f"{self.risk}: {self.what.rstrip('.')}. {self.remedy.rstrip('.')}"
