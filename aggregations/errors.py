"""What can be wrong with a flow's definition or with a run of it."""


class FlowError(ValueError):
    """The flow's definition cannot work; the text says what to change."""


class RunRefusedError(Exception):
    """Going on would be unsafe; the text names the remedy."""


class DefinitionChangedError(RunRefusedError):
    """A stored state was made by another definition of its stage."""


class TasksLostError(Exception):
    """Spark lost tasks of a batch, with a worker process or with the source; the batch may be tried again."""


class SharedKeyError(Exception):
    """A key was met in two partitions of a topic that is said to be partitioned by it; nothing of it was written."""
