"""`headwater republish`: a service between topics."""

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import (
    METADATA_MAX_AGE,
    STACK_ROOT,
    Bootstrap,
    EventId,
    FromCluster,
    Json,
    KafkaFile,
    MetadataMaxAge,
    Root,
    filled,
)
from jobs.environment import UsageError
from jobs.screen import counted, emit, progress, say
from persistence.names import MAX_GENERATION

if TYPE_CHECKING:
    from jobs.republish.counts import Statistics
    from persistence.kafka import KafkaSettings

_KINDS = "envelope, raw, json or cloudevents"


def republish(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="The transform: gets a record, returns None, an OutputRecord, or several. "
            "jobs.republish.record:identity forwards every record unchanged.",
        ),
    ],
    source: Annotated[
        list[str], typer.Option("--from", metavar="TOPIC", help="Topic to read; may be repeated.", callback=filled)
    ],
    target: Annotated[
        list[str],
        typer.Option(
            "--to", metavar="TOPIC", help="Topic to write; may be repeated, the first is the default.", callback=filled
        ),
    ],
    via: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of this republisher: part of every message's chain, do not change it.",
            callback=filled,
        ),
    ],
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Consumer group. Without it: the value of --via.", show_default=False, callback=filled
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of this process within the group (static membership): after a crash it gets its partitions "
            "back immediately, without waiting for the session to time out.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option("--input", metavar="KIND", help=f"Format of the topics to read: {_KINDS}.")
    ] = "envelope",
    event_id: EventId = None,
    from_cluster: FromCluster = None,
    tombstones: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Records without a value: skip, or dead_letter to reject them as empty."),
    ] = "skip",
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Topic for rejected records. Without it, the first rejected record ends the service.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    deduplicate: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A filter that drops duplicates before the transform, such as `ids = SequenceFilter(from_value('id'))` in a "
            "module of yours. It needs --store.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A DedupPolicy: the topics in which the filter drops duplicates. Without it: all.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store of the filter's states, the same for all processes of the group.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    generation: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_GENERATION,
            help="Number of the set of the filter's states; another one begins empty.",
        ),
    ] = 1,
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="Stop at the current ends of the partitions.")
    ] = False,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of records between two commits.")
    ] = 50_000,
    topic_wait: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How long to wait for a topic that does not exist or was deleted: 5m, 0 for no wait, forever.",
        ),
    ] = "5m",
    metadata_max_age: MetadataMaxAge = METADATA_MAX_AGE,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RISK",
            help="Accept a risk for which the run is refused; the refusal names it. May be repeated.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Transform each record of a topic, and write the results.

    Each result has one more hop in its chain. Without a filter, a republisher keeps no state: after a crash it sends
    uncommitted records again, with the same chain and index, so that a flow recognises the copies. Ctrl-C or SIGTERM ends
    it after it has committed the records in flight.

    With --json it writes one line per commit, one per minute while it waits for a topic, one when the growth of a topic
    begins, changes or ends, and one, with `"done": true`, at the end.
    """
    from jobs import settings
    from jobs.loading import load, load_function
    from jobs.republish.run import republish as serve
    from jobs.republish.source import InputTopics

    if store:
        settings.check_shared("the store of the filter", store)
    transform = load_function(function)
    try:
        topics = InputTopics.of(tuple(source), kind, tombstones, event_id)
    except ValueError as error:
        raise UsageError(str(error)) from error
    patience = settings.patience(topic_wait, "--topic-wait")
    max_age = settings.seconds(metadata_max_age, "--metadata-max-age")
    kafka = settings.kafka(bootstrap, root, kafka_settings)
    if instance:
        kafka = kafka.with_options(group_instance_id=instance)
    cluster, elsewhere = settings.other_cluster(from_cluster)
    if instance and elsewhere:
        elsewhere = elsewhere.with_options(group_instance_id=instance)
    total = _unread(elsewhere or kafka, source, group or via) if until_caught_up else None
    with progress(f"republisher {via}", total, "records") as bar:

        def committed(done: "Statistics") -> None:
            bar(done.consumed)
            if json:
                emit(done.as_dict())

        done = serve(
            transform,
            until_caught_up=until_caught_up,
            progress=committed,
            source=topics,
            target=target,
            name=via,
            settings=kafka,
            cluster=cluster,
            source_settings=elsewhere,
            group=group,
            dead_letter=dead_letters,
            batch_size=batch,
            topic_wait=patience,
            metadata_max_age=max_age,
            accept=accept or (),
            deduplicate=load(deduplicate) if deduplicate else None,
            **({"policy": load(policy)} if policy else {}),
            store=store,
            generation=generation,
        )
    if json:
        emit({"done": True, **done.as_dict()})
    else:
        dead = f", {sum(done.dead_lettered.values()):,} to {dead_letters}" if done.dead_lettered else ""
        judged = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(done.verdicts.items()))
        say(f"{counted(done.consumed, 'record')} read, {done.produced:,} written{dead}{judged and f' ({judged})'}")


def _unread(kafka: "KafkaSettings", topics: list[str], group: str) -> int | None:
    """Number of records that the group has not committed; None while a topic is missing."""
    from persistence.kafka import TopicMissing, Topics

    broker = Topics(kafka)
    try:
        start, marks = broker.group_offsets(group, topics), broker.marks(topics)
    except TopicMissing:
        return None
    return sum(max(ends.high - max(start.get(place, 0), ends.low), 0) for place, ends in marks.items())
