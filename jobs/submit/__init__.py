"""Flow files as programs, for Python and for `spark-submit`.

```python
flow = Flow("fleet").source(...).aggregate(...)

if __name__ == "__main__":
    run(flow)
```
"""

from jobs.submit.program import run

__all__ = ["run"]
