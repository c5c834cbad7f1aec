"""Why a record is not used."""

from typing import NamedTuple

from aggregations.errors import FlowError
from envelope import EnvelopeError, Reason
from envelope.raised import Raised


class Cause(NamedTuple):
    """Why a record is not used.

    Attributes:
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        raised: What user code raised, if it did.
    """

    reason: Reason
    detail: str
    raised: Raised | None = None

    @classmethod
    def of(cls, error: EnvelopeError) -> "Cause":
        """The cause that an error carries."""
        return cls(error.reason, error.detail, error.raised)


def refusal(error: Exception, reason: Reason, where: str) -> EnvelopeError:
    """What user code raised, as an error with a reason code.

    Args:
        error: What was caught.
        reason: Reason code, unless the error has one.
        where: What ran, such as `the fold of stage carrier`.
    """
    if isinstance(error, EnvelopeError):
        return error
    if isinstance(error, FlowError):
        return EnvelopeError(Reason.BAD_PAYLOAD, str(error))
    found = EnvelopeError(reason, f"{type(error).__name__} in {where}")
    found.raised = Raised.of(error)
    return found
