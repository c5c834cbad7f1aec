"""Flow files as programs: under Python, and given to `spark-submit` as they are.

```python
flow = Flow("fleet").source(...).aggregate(...)

if __name__ == "__main__":
    run(flow)
```
"""

from jobs.submit.program import run

__all__ = ["run"]
