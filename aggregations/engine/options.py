"""How a run of a flow is configured: the one argument that runners, the engine and commands share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.definition.operators import Publish, PublishStates, flattened
from aggregations.engine.sampling import ALL, check_share
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.risks import check_accept
from aggregations.run.start import EARLIEST, Starts, checked_starts
from envelope import TopicPartition
from persistence.growth import METADATA_MAX_AGE_SECONDS
from persistence.kafka import KafkaSettings
from persistence.manifest import Rebuilt

PARQUET: Final = "parquet:"
"""What the location of an archive begins with, before its path."""
MAX_RECORDS: Final = 1_000_000
"""Maximum number of records of one batch: without it the first batch of a flow would be the whole topic."""


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """What is different in the run of a rebuild: nothing is sent, dead letters are held, no group offsets are committed.

    Attributes:
        note: The note in its manifests.
        until: Offset after the last record that the live generation has committed, by topic and partition. The rebuild
            reads no record beyond it.
        outputs: Outputs are held; otherwise they are only counted.
        branches: Where logs were written anew, as the live generation knows it; see `persistence.manifest.Progress`.
    """

    note: Rebuilt
    until: Mapping[TopicPartition, int]
    outputs: bool = False
    branches: Mapping[TopicPartition, tuple[tuple[int, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a flow reads, writes and keeps its states, and how its batches are made. Plain data, which can be pickled.

    Attributes:
        kafka: Settings of the Kafka cluster with the sources, outputs and dead letters. Only an aggregator that writes to no
            topic may do without.
        stores: URL of the store by stage name, as for `bind`; or one URL, for the stages whose definitions name none.
        dead_letters: Dead-letter topic. Without one the first record that cannot be used ends the run.
        journal: Topic that gets an entry for each batch, for `headwater explain`; None for none.
        journal_share: Share of the events whose dropped records it lists, above 0 and at most 1.
        group: Consumer group whose offsets show the flow's progress to lag tools; the flow's name when None.
        generation: Generation of the states; None for the live one.
        accept: Names of accepted risks; see `aggregations.run.risks.Risk`.
        start: Where a flow begins to read a topic that it has never read: `earliest`, `latest`, an aware `datetime`
            (the first records at or after it, by their timestamps), or the offset of every partition; with several
            sources also a mapping of topics to these. In a stream of rows (`Aggregator`) `earliest`, or `delivered`: at
            the first record that is delivered. The stores keep it. A flow that has begun continues from its
            stores.
        until_caught_up: Stop at the current ends of the partitions.
        trigger_seconds: Persist interval: at most one batch in this time, in seconds.
        max_records: Maximum number of records of one batch; 0 for no limit.
        metadata_max_age: Seconds for which producers of the source topic may not know of added partitions: the
            largest `metadata.max.age.ms` of all producers.
        history: An archive of the sources, from which is read what Kafka no longer has: `parquet:PATH`, a file, a directory
            or a glob, with the columns of Spark's Kafka source; None for none.
        rebuilding: The run rebuilds a generation for `jobs.replay`; None for any other run.
        sends: Outputs and dead letters are sent, and the group's offsets are written. Otherwise outputs and dead letters
            are only counted; a rebuild, which sends nothing, holds some of them.
    """

    kafka: KafkaSettings | None = None
    stores: Mapping[str, str] | str = field(default_factory=dict)
    dead_letters: str | None = None
    journal: str | None = None
    journal_share: float = ALL
    group: str | None = None
    generation: int | None = None
    accept: Sequence[str] = ()
    start: Starts = EARLIEST
    until_caught_up: bool = False
    trigger_seconds: float = 1.0
    max_records: int = MAX_RECORDS
    metadata_max_age: float = METADATA_MAX_AGE_SECONDS
    history: str | None = None
    rebuilding: Rebuilding | None = None
    sends: bool = True

    @classmethod
    def given(cls, caller: str, options: "RunOptions | None", fields: Mapping[str, Any]) -> "RunOptions":
        """The options that a caller got: as such, or as fields of their own.

        Raises:
            FlowError: Both were given, or there is no such option.
        """
        if options is not None and fields:
            raise FlowError(f"{caller}() takes options, or fields of RunOptions such as {min(fields)}=, not both")
        known = [name for name in cls.__dataclass_fields__ if name not in ("rebuilding", "sends")]
        if unknown := sorted(fields.keys() - {*known}):
            raise FlowError(f"{caller}() has no option {unknown[0]}=; the options are {', '.join(known)}")
        return options or cls(**fields)

    @property
    def broker(self) -> KafkaSettings:
        """Settings of the Kafka cluster.

        Raises:
            FlowError: There are none.
        """
        check_type("kafka=", self.kafka, KafkaSettings, 'KafkaSettings, such as KafkaSettings("localhost:9092")')
        assert self.kafka is not None
        return self.kafka

    @property
    def archive(self) -> str | None:
        """Location of the archive; None if there is none.

        Raises:
            FlowError: It is not a location.
        """
        if self.history is not None and (self.history == PARQUET or not str(self.history).startswith(PARQUET)):
            raise FlowError(
                f"history={self.history!r}: write parquet:PATH, the path of a Parquet file, of a directory of such files, or a "
                "glob (--history)"
            )
        return self.history

    @property
    def urls(self) -> Mapping[str, str]:
        """URL of the store by stage name; only of bound options."""
        assert not isinstance(self.stores, str), "options have to be bound to a flow"
        return self.stores

    def bound(self, flow: Flow[Any]) -> Self:
        """The options for one flow: every stage has a store, the start is checked, and the group has its name.

        Raises:
            FlowError: A stage has no store, `stores` names a stage that does not exist, the start, the history or a number
                is invalid, or an option has the wrong type.
        """
        for name in ("max_records", "trigger_seconds", "metadata_max_age"):
            if (given := getattr(self, name)) is not None and not given >= 0:
                raise FlowError(f"{name}={given}: it must not be negative")
        urls = bind(flow, {}, self.stores) if isinstance(self.stores, str) else bind(flow, self.stores)
        sends = self.sends and self.rebuilding is None
        bound = replace(self, stores=urls, sends=sends, group=(self.group or flow.name) if sends else None)
        if self.archive is not None or self.kafka is not None:
            _ = self.broker
        return replace(bound, start=checked_starts(self.start, flow.topics))

    def keeps_order(self, flow: Flow[Any]) -> bool:
        """Whether the records of one key must stay in order when partitions are added: it publishes, or filters by key.

        A rebuild that drops its outputs publishes nothing, nor does a run that only counts them. Only of bound options.
        """
        publishes = self.sends or (self.rebuilding is not None and self.rebuilding.outputs)
        return (publishes and flow.publishes) or flow.filters_by_key

    def checked(self, flow: Flow[Any]) -> Self:
        """The options bound to a flow, without the invalid combinations that need no answer from a server.

        Raises:
            FlowError: As for `bound`; or states would end with the process, a risk does not exist, the share is invalid,
                or the flow reads what it publishes, or reads or publishes to the dead-letter topic or the journal.
        """
        bound, outputs = self.bound(flow), outputs_of(flow)
        if back := sorted({*outputs} & {one.topic.name for one in flow.inputs}):
            raise FlowError(
                f"flow {flow.name}: it publishes to {back[0]}, which it reads, so its outputs would come back; publish to "
                "another topic"
            )
        if self.dead_letters in flow.topics:
            raise FlowError(
                f"flow {flow.name}: --dead-letters {self.dead_letters} is the flow's source, so the flow would read its own "
                "dead letters; use a separate topic"
            )
        if self.dead_letters in outputs:
            raise FlowError(
                f"flow {flow.name}: --dead-letters {self.dead_letters} is a topic that the flow publishes to, so its readers "
                "would receive dead letters; use a separate topic"
            )
        if self.journal is not None and self.journal in {*flow.topics, *outputs, self.dead_letters}:
            raise FlowError(
                f"flow {flow.name}: --journal {self.journal} is a topic that the flow reads or writes; use a separate topic"
            )
        check_share("--journal-share", self.journal_share)
        for name, url in bound.urls.items():
            if url.startswith("memory:"):
                raise FlowError(
                    f"stage {name!r}: the states in {url} end with the process, and no other process can read them; use "
                    "sqlite:///PATH or lmdb:///PATH"
                )
        check_accept(flow.name, bound.urls, self.accept)
        return bound


def outputs_of(flow: Flow[Any]) -> list[str]:
    """The topics that a flow publishes to."""
    return [
        topic
        for step in flattened(flow.every_step)
        if isinstance(step, Publish | PublishStates)
        for topic in step.targets
    ]
