"""headwater beside its peers: the same topics of one broker, systems taking turns, every result checked.

A broker and the stores' servers are started on loopback and ended again. Each topic of four partitions is
filled with sealed envelopes of one republish hop, part of them re-sent at new offsets; the seed is printed.
Every system drains it in processes of its own and keeps count, sum and maximum per key. What each figure
means: docs/performance.md.

exit codes: 0 everything ran as it claims; 1 a system that claims exactly-once was not verified, or failed;
2 wrong options; 3 a server or Java is missing, or no system could run; 130 interrupted by Ctrl-C, with the figures
so far
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench import Plan, bench, environment
from benchmarks.peers.systems import DEFAULT_STORES, NAMES, STORES, chosen
from benchmarks.plot import svg
from benchmarks.report import Subject, ratios, show
from jobs import stack
from jobs.screen import emit, say
from jobs.stack.jars import JarsUnavailable
from jobs.stack.java import JavaUnavailable

OK, NOT_VERIFIED, USAGE, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments say, and return the exit code."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        chosen(options.only, options.stores),
        options.events,
        options.slow_events,
        options.keys,
        options.resent,
        options.seed,
        options.rounds,
        options.batch,
    )
    machine = environment()
    subjects: list[Subject] = []
    code = OK
    try:
        bench(plan, out, subjects)
    except (stack.StackError, JarsUnavailable, JavaUnavailable) as error:
        say(str(error))
        return UNAVAILABLE
    except KeyboardInterrupt:
        code = INTERRUPTED
    ratio = ratios(subjects, lambda one: one.warm)
    told = {
        "workload": {name: getattr(options, name) for name in ("events", "slow_events", "resent", "seed", "rounds")},
        "machine": machine,
        "systems": [subject.as_json() for subject in subjects],
        "ratio": ratio,
        "ratio_from_start": ratios(subjects, lambda one: one.from_start),
        "ratio_cpu": ratios(subjects, lambda one: one.cpu),
    }
    (out / "bench.json").write_text(json.dumps(told, indent=2) + "\n")
    (out / "bench.svg").write_text(svg(subjects))
    say(f"plot and figures: {out / 'bench.svg'}, {out / 'bench.json'}")
    if options.json:
        emit(told)
    else:
        show(subjects)
        for keys, stores in ratio.items():
            shares = ", ".join(f"{store} {one}" for store, one in stores.items())
            say(f"headwater by Kafka Streams, events/s warm, {int(keys):,} keys: {shares}")
    return code or judged(subjects)


def judged(subjects: Sequence[Subject]) -> int:
    """Return the exit code for what was found."""
    if all(subject.unavailable for subject in subjects):
        return UNAVAILABLE
    return NOT_VERIFIED if any(subject.breaks_its_claim for subject in subjects) else OK


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names(NAMES), default=NAMES, help=f"systems, of: {','.join(NAMES)}")
    parser.add_argument(
        "--stores",
        type=_names(STORES),
        default=DEFAULT_STORES,
        help=f"of headwater ({','.join(DEFAULT_STORES)}), of: {','.join(STORES)}",
    )
    parser.add_argument("--events", type=_positive, default=3_000_000, help="records of each topic (3000000)")
    parser.add_argument("--slow-events", type=_positive, default=100_000, help="records for slow systems (100000)")
    parser.add_argument("--keys", type=_numbers, default=[10_000, 1_000_000], help="numbers of keys (10000,1000000)")
    parser.add_argument("--resent", type=_share, default=0.05, help="share of re-sent records (0.05)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the draw (7)")
    parser.add_argument("--rounds", type=_positive, default=3, help="runs of each system; medians are told (3)")
    parser.add_argument("--batch", type=_positive, default=500_000, help="most records of a micro-batch (500000)")
    parser.add_argument("--out", type=Path, default=Path(".headwater/bench"), help="for bench.json, bench.svg, logs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object instead of the table")
    return parser.parse_args(arguments)


def _names(known):
    def parse(text):
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def _numbers(text):
    return [_positive(part) for part in text.split(",")]


def _positive(text):
    number = int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


def _share(text):
    share = float(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: at least 0 and below 1")
    return share


if __name__ == "__main__":
    sys.exit(main())
