"""`python -m tests.soak`: begin a soak, or go on with the one in the state directory."""

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

from tests.soak.report import Soak, show
from tests.soak.run import soak
from tests.soak.servers import forget


def main() -> int:
    """Run what the arguments say.

    Returns:
        0 when everything held, 1 when something did not.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="orders to send at least")
    parser.add_argument("--keys", type=int, default=10_000, help="customers, and as many articles")
    parser.add_argument("--kills", type=int, default=100, help="kills of services; all else goes by it")
    parser.add_argument("--stores", default="redis,cassandra", help="of the first and the second stage, or of both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=Path(".headwater/soak"), help="data, logs and report.json")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no round after that; go on with the same call"
    )
    parser.add_argument("--remove", action="store_true", help="remove the state directory, and what is mounted there")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    if options.remove:
        forget(options.state / "servers")
        shutil.rmtree(options.state)
        return 0
    stores = (options.stores.split(",") * 2)[:2]
    plan = Soak(options.seed, options.messages, options.keys, options.kills, stores)
    this = soak(plan, options.state.absolute(), options.minutes)
    if options.json:
        print(json.dumps(this.summary()))
    else:
        show(this)
    return bool(this.violations)


if __name__ == "__main__":
    sys.exit(main())
