"""A republisher in a separate process, for tests that kill it; the arguments are JSON on the command line."""

import json
import sys

from jobs.loading import load
from jobs.republish import InputRecord, InputTopics, OutputRecord, RetryTopics, republish
from persistence.kafka import KafkaSettings, librdkafka


def split(record: InputRecord) -> list[OutputRecord]:
    """`3:a,b` becomes two messages with the keys `a` and `b`; `3:` none; anything else is poison."""
    number, _, names = record.payload.decode().partition(":")
    int(number)
    return [
        OutputRecord(b"%s/%s" % (number.encode(), name.encode()), key=name.encode())
        for name in names.split(",")
        if name
    ]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    if arguments.pop("objects", False):  # as with a version of confluent-kafka that was not checked
        librdkafka.is_known = lambda: False
    settings = KafkaSettings(arguments.pop("bootstrap"), arguments.pop("options", {}))
    source = InputTopics.of(arguments.pop("source"), arguments.pop("kind"))
    retry = RetryTopics(arguments.pop("retry", {}))
    if "deduplicate" in arguments:
        arguments["deduplicate"] = load(arguments["deduplicate"])
    done = republish(
        arguments.pop("transform", split),
        source=source,
        settings=settings,
        retry=retry,
        progress=lambda counts: print(counts.consumed, flush=True),
        **arguments,
    )
    print(json.dumps(done.as_dict()), flush=True)


if __name__ == "__main__":
    main()
