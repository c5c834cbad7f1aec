"""Errors of a flow's definition and of a run."""


class FlowError(ValueError):
    """The flow's definition cannot work; the text says what to change."""


class RunRefusedError(Exception):
    """It would be unsafe to continue; the text names the remedy."""


class DefinitionChangedError(RunRefusedError):
    """A stored state was made by another definition of its stage."""


class TasksLostError(Exception):
    """Spark lost tasks of a batch, with a worker process or with the source; the batch may be retried."""


class SharedKeyError(Exception):
    """A key arrived in two partitions of a topic that is declared as partitioned by it; nothing was written for it.

    Attributes:
        topic: The topic; empty if the two partitions may be of two topics.
    """

    def __init__(self, text: str, topic: str = "") -> None:
        super().__init__(text)
        self.topic = topic


class SparkEndedError(TasksLostError):
    """Spark itself ended; no batch can be retried."""
