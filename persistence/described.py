"""Enumerations whose members have a description."""

from enum import StrEnum
from typing import Self


class Described(StrEnum):
    """Base of a closed set of names; a member is defined by its value and its text.

    Attributes:
        text: What the name means.
    """

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member
