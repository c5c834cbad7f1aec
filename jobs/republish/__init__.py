"""Republishing: services that forward messages, changed or not, and append one hop to their chain.

```python
def legs(record: InputRecord) -> list[OutputRecord]:
    flight = record.data
    return [OutputRecord(payload=encode(leg), key=flight["tail"].encode()) for leg in split(flight)]

Republisher(
    legs,
    source=InputTopics("flights.raw", Wrapping.NONE, JsonPayload),
    target="flights.legs",
    dead_letter="flights.dead",
    name="legs",
    settings=KafkaSettings.load("localhost:9092"),
).run()
```

The transform itself needs no Kafka: `Processor` runs it on one record.
"""

from jobs.republish.counts import Statistics
from jobs.republish.processor import Outgoing, Processor, TransformError
from jobs.republish.record import KEEP, PASS, InputRecord, OutputRecord, Transform, identity
from jobs.republish.retry import RetryTopics
from jobs.republish.run import republish
from jobs.republish.service import Republisher
from jobs.republish.source import InputTopics, JsonPayload, Wrapping

__all__ = [
    "KEEP",
    "PASS",
    "JsonPayload",
    "Outgoing",
    "OutputRecord",
    "Processor",
    "InputRecord",
    "Republisher",
    "RetryTopics",
    "InputTopics",
    "Statistics",
    "Transform",
    "TransformError",
    "Wrapping",
    "identity",
    "republish",
]
