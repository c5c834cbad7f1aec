"""Options shared by several commands."""

from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import typer

from persistence.names import MAX_GENERATION

T = TypeVar("T")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def filled(value: T) -> T:
    """Refuse an empty text: usually a shell variable that is not set, which must not count as a missing option.

    Text that is not UTF-8 is refused, too: confluent-kafka would end the process.
    """
    for text in value if isinstance(value, list) else [value]:
        if text == "":
            raise typer.BadParameter("it is empty")
        if isinstance(text, str) and not _is_utf8(text):
            raise typer.BadParameter("it is not UTF-8")
    return value


def path_of(text: str | Path) -> Path:
    """Read a path: an empty text would mean the current directory."""
    if text == "":
        raise typer.BadParameter("it is empty")
    return Path(text)


FlowName: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODULE:FLOW", help="The flow: `fleet:flow` is `flow` in fleet.py of this directory.")
]
Bootstrap: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Kafka's address. Without it: HEADWATER_KAFKA_BOOTSTRAP, headwater.toml, then the local stack.",
        show_default=False,
        callback=filled,
    ),
]
KafkaFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--kafka-settings",
        metavar="FILE",
        parser=path_of,
        help="TOML file with the Kafka settings in its table [kafka]; the environment (HEADWATER_KAFKA_*) overrides it. Without it: headwater.toml.",
        show_default=False,
    ),
]
Root: TypeAlias = Annotated[
    Path,
    typer.Option("--root", metavar="DIRECTORY", help="Directory of the local stack's data.", parser=path_of),
]
Stores: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        metavar="[STAGE=]URL",
        help="Store of all stages, or of one; may be repeated. Without it: HEADWATER_STORE, headwater.toml, the "
        "flow's definition, then the LMDB store in .headwater/states.",
        show_default=False,
        callback=filled,
    ),
]
Group: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Consumer group whose offsets show the flow's progress to lag tools. Without it: the flow's name.",
        show_default=False,
        callback=filled,
    ),
]
Accept: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RISK",
        help="Accept a risk for which the run is refused; the refusal names it. May be repeated.",
        show_default=False,
    ),
]
MetadataMaxAge: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="How long producers may be unaware of added partitions: their largest metadata.max.age.ms.",
    ),
]
METADATA_MAX_AGE = "5m"
DeadLetters: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TOPIC",
        help="Topic for rejected records. Without it: headwater.toml; without both, the first rejected record ends the run.",
        show_default=False,
        callback=filled,
    ),
]
JournalTopic: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--journal",
        metavar="TOPIC",
        help="Topic with an entry for each batch: what it read and dropped. Without it: headwater.toml; without both, none.",
        show_default=False,
        callback=filled,
    ),
]
JournalShare: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the events that the journal lists if they are dropped, such as 0.1. Without it: headwater.toml, then 1.",
        show_default=False,
    ),
]
MAX_RECORDS: Final = 1_000_000
MaxRecords: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=0, help="Maximum number of records per batch; 0 for no limit.")
]
SparkMaster: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark's master. Without it: that of spark-submit, then local[2].",
        show_default=False,
        callback=filled,
    ),
]
Generation: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_GENERATION,
        metavar="N",
        help="Number of the set of states; a rebuild writes a new one. Without it: headwater.toml, then the live one.",
        show_default=False,
    ),
]
StartAt: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--start",
        metavar="[TOPIC=]POSITION",
        help="Where a flow begins to read a topic that it has never read: earliest (without this option), latest, a "
        "time such as 2026-11-24T06:00:00Z, or the offset of each partition as in 0:120,1:95. May be repeated with the "
        "names of topics.",
        show_default=False,
        callback=filled,
    ),
]
DeadLetterTopic: TypeAlias = Annotated[
    str, typer.Option("--from", metavar="TOPIC", help="The dead-letter topic.", callback=filled)
]
Reasons: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--reason", metavar="CODE", help="Only this reason code; may be repeated.", show_default=False),
]
Stages: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--stage", metavar="NAME", help="Only from this stage; may be repeated.", show_default=False),
]
RecordTopics: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="TOPIC", help="Only records of this topic; may be repeated.", show_default=False),
]
EventId: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Give records without an envelope an event id: coordinates, field:NAME, or hash:NAME,NAME,... of the fields of "
        "a JSON payload.",
        show_default=False,
        callback=filled,
    ),
]
FromCluster: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=HOST:PORT",
        help="Read from another Kafka cluster; its name is written into every message's chain, do not change it. Instead of "
        "the address, a TOML file with the settings in its table [kafka].",
        show_default=False,
        callback=filled,
    ),
]
Ranges: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="RANGE",
        help="TOPIC, TOPIC:PARTITION, TOPIC:PARTITION:FIRST-LAST (offsets, both inclusive), or TIME/TIME as in "
        "2026-11-24T06:00:00Z/2026-11-24T07:00:00Z; may be repeated. Without it: everything in the topics.",
        show_default=False,
        callback=filled,
    ),
]
SAMPLE: Final = 10
Sample: TypeAlias = Annotated[
    int, typer.Option("--sample", min=0, metavar="N", help="Show this many differences of each stage.")
]
FOLDS: Final = Path(".headwater/folds")
Work: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--work",
        metavar="DIRECTORY",
        parser=path_of,
        help="Where the states are while they are compared; needs as much room as they. Nothing stays in it.",
    ),
]
FromSnapshot: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        metavar="FILE|URL#NAME",
        callback=filled,
        help="Begin with this snapshot of `headwater snapshot` instead of the flow's start.",
        show_default=False,
    ),
]
FromArchive: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="parquet:PATH",
        callback=filled,
        help="Read what Kafka no longer has from an archive: a file, directory or glob with the columns of Spark's Kafka source.",
        show_default=False,
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON lines to standard output.")]
STACK_ROOT = Path(".headwater/stack")
