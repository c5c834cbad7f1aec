"""What a preflight finds in a store before a flow runs on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a server that can cost states or time.

    Attributes:
        risk: Short name, the same in every run: what `--accept` takes.
        what: What was found, and where.
        remedy: What to change.
        unsafe: States can be lost or doubled by it; otherwise it costs availability or speed.
    """

    risk: str
    what: str
    remedy: str
    unsafe: bool = False

    def __str__(self) -> str:
        return f"{self.risk}: {self.what.rstrip('.')}. {self.remedy.rstrip('.')}"
