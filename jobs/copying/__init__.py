"""Copies of a topic, a query or a file into a topic: each record exactly once, whatever crashes.

```python
Copy("orders-to-west", TopicRecords("orders"), "orders.copy", KafkaSettings.load("localhost:9092")).run()
```
"""

from jobs.copying.counts import CopyStatistics
from jobs.copying.lines import FileLines
from jobs.copying.query import QueryRows
from jobs.copying.run import copy
from jobs.copying.service import Copy
from jobs.copying.topics import TopicRecords

__all__ = ["Copy", "CopyStatistics", "FileLines", "QueryRows", "TopicRecords", "copy"]
