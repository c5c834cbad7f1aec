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
        raised: Exception of user code, if any.
    """

    reason: Reason
    detail: str
    raised: Raised | None = None

    @classmethod
    def of(cls, error: EnvelopeError) -> "Cause":
        """The cause from an error."""
        return cls(error.reason, error.detail, error.raised)


def refusal(error: Exception, reason: Reason, where: str) -> EnvelopeError:
    """Convert an exception of user code to an error with a reason code.

    Args:
        error: The exception.
        reason: Reason code, unless the exception has one.
        where: The code that ran, such as `the fold of stage carrier`.
    """
    if isinstance(error, EnvelopeError):
        return error
    if isinstance(error, FlowError):
        return EnvelopeError(Reason.BAD_PAYLOAD, str(error))
    found = EnvelopeError(reason, f"{type(error).__name__} in {where}")
    found.raised = Raised.of(error)
    return found
