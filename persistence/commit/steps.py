"""The steps of a commit, in order. One name each, for docstrings, code, fault points, simulator and logs."""

from persistence.described import Described


class CommitStep(Described):
    """A step of the commit; the members are in the order in which a batch runs them.

    A crash between any two steps loses nothing and counts nothing twice.
    """

    FETCH = "fetch", "the batch is delivered: a contiguous range of offsets per topic and partition"
    LOAD = "load", "the states of the batch's keys are read, upstream stage first"
    FOLD = "fold", "verdicts are decided and elements folded, stage by stage, in memory"
    PUBLISH = "publish", "outputs and dead letters are produced and acknowledged"
    PERSIST = "persist", "a stage's states are written and acknowledged: the last stage first, the first one last"
    MANIFEST = "manifest", "the next offsets are written to every store, downstream store first"
    RETURN = "return", "the driver returns to its loop"
    OFFSETS = "offsets", "the consumer group's offsets are committed to Kafka; advisory, for lag tools"

    def of(self, name: str) -> str:
        """The step for one stage (load, persist) or for one store (manifest): `persist:aircraft`."""
        return f"{self.value}:{name}"

    @property
    def number(self) -> int:
        """Place in the order; the first is 1."""
        return list(CommitStep).index(self) + 1
