"""A producer session in a separate process, for tests that kill it: it sends the lines of a file, by their offset."""

import json
import sys
from pathlib import Path

from persistence.kafka import KafkaSettings, ProducerSession, transactions

# Tests read on as soon as the broker has aborted what a killed process left open.
setattr(transactions, "TRANSACTION_TIMEOUT_MS", 15_000)  # noqa: B010 - it is final to mypy


def main() -> None:
    arguments = json.loads(sys.argv[1])
    settings, flush_every = KafkaSettings(arguments["bootstrap"]), arguments["flush_every"]
    session = ProducerSession("till", arguments["topic"], settings, transactional=arguments["transactional"])
    last, offset = session.last_sequence_id(), 0
    print(json.dumps({"last": last, "epoch": session.epoch}), flush=True)
    for number, line in enumerate(Path(arguments["file"]).read_bytes().splitlines(keepends=True)):
        key = b"k%d" % (number % 7)
        if not session.contains(offset, key):
            session.send(line, key, sequence=offset)
            if number % flush_every == flush_every - 1:
                session.flush()
        offset += len(line)
    session.flush()
    print("done", flush=True)


if __name__ == "__main__":
    main()
