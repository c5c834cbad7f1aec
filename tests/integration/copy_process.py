"""A copy in a separate process, for tests that kill it; the arguments are JSON on the command line."""

import json
import sys
from typing import Any

from jobs.copying import FileLines, QueryRows, TopicRecords, copy
from jobs.republish import InputTopics
from persistence.kafka import KafkaSettings


def source_of(kind: str, given: Any, elsewhere: str | None) -> Any:
    match kind:
        case "topic":
            topics = InputTopics.of(given["topic"], given.get("kind", "raw"), event_id=given.get("event_id"))
            settings = KafkaSettings(elsewhere) if elsewhere else None
            return TopicRecords(topics, settings, cluster="west" if elsewhere else "")
        case "lines":
            return FileLines(given)
        case _:
            return QueryRows(given, "SELECT number, name FROM orders", "number", key="name")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    settings = KafkaSettings(arguments.pop("bootstrap"))
    source = source_of(arguments.pop("kind"), arguments.pop("source"), arguments.pop("elsewhere", None))
    done = copy(
        arguments.pop("name"),
        source,
        arguments.pop("target"),
        settings,
        progress=lambda counts: print(counts.read, flush=True),
        **arguments,
    )
    print(json.dumps(done.as_dict()), flush=True)


if __name__ == "__main__":
    main()
