"""`headwater replay` on a real broker: what it shows, in text and as JSON."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.engine.options import RunOptions
from aggregations.local import run_local
from aggregations.run.binding import bind
from jobs.cli.errors import Exit
from jobs.loading import load_flow
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from tests.support.cli import run

pytestmark = pytest.mark.integration

FLOWS = """
from aggregations import Fields, Flow, Topic, count, total
from aggregations.definition.source import Json

source = Flow("fleet").source(Topic({topic!r}, Json({{"tail": str, "minutes": int}}), envelope=False))
flow = source.aggregate("aircraft", "tail", Fields(n=count()))
changed = source.aggregate("aircraft", "tail", Fields(n=count(), minutes=total("minutes")))
"""


def test_a_rebuild_from_its_plan_to_the_audit_of_its_swap(
    kafka: str,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name, module, settings = topic(name="legs"), f"flows_{uuid.uuid4().hex}", KafkaSettings(kafka)
    Path(f"{module}.py").write_text(FLOWS.format(topic=name))
    with AcknowledgedProducer(settings) as producer:
        for n in range(10):
            producer.send(name, b'{"tail": "N%d", "minutes": 5}' % (n % 2), b"N%d" % (n % 2))
        producer.flush()
    flow = load_flow(f"{module}:flow")
    run_local(
        flow, RunOptions(kafka=settings, stores=bind(flow, {}, f"sqlite://{tmp_path}/s.db"), until_caught_up=True)
    )

    def replay(which: str, *options: str, code: Exit = Exit.DONE) -> tuple[str, str]:
        given = ["replay", f"{module}:{which}", *options, "--store", f"sqlite://{tmp_path}/s.db", "--bootstrap", kafka]
        assert run(monkeypatch, *given) == code, capsys.readouterr().err
        said = capsys.readouterr()
        return said.out, said.err

    assert "stage aircraft has another definition there" in replay("changed", code=Exit.REFUSED)[1]
    out, err = replay("changed", "--redefine")
    assert [line.split() for line in out.splitlines() if line.startswith(name)] == [[name, "0", "0", "10", "10", "0"]]
    assert ["aircraft", "2"] in [line.split() for line in out.splitlines()]
    assert "stage aircraft has another definition than in generation 1\n" in err
    assert "to read 10 offsets as fast as 10 records were read just now" in err
    assert "generation 1 is live; --apply rebuilds generation 2\n" in err
    local = ["--reason", "minutes, too", "--runner", "local"]
    out, _ = replay("changed", "--apply", "--redefine", *local, "--json")
    assert json.loads(out) | {"batches": 1} == {
        "flow": "fleet",
        "generation": 2,
        "live": 1,
        "records": 10,
        "batches": 1,
        "dead_letters": {},
        "outputs": 0,
        "behind": 0,
    }
    out, err = replay("changed")
    assert "rebuild of generation 2 by " in err
    assert "not compared, because the definition has changed: aircraft" in err
    assert "generation 1 is live; --apply continues the rebuild of generation 2\n" in err
    out, err = replay("changed", "--against", f"{module}:flow")
    assert "differences as of now: generation 2 is 0 offsets behind" in err
    assert ["aircraft", "minutes", "2"] in [line.split()[:3] for line in out.splitlines()]
    told = json.loads(replay("changed", "--against", f"{module}:flow", "--json")[0])
    assert told["differences"]["stages"]["aircraft"]["changed"] == 2
    assert (told["begun"], told["changes"][0]["why"]) == (True, "minutes, too")
    out, err = replay("changed", "--swap", *local, "--against", f"{module}:flow")
    assert ["aircraft", "minutes", "2"] in [line.split()[:3] for line in out.splitlines()]
    assert "generation 2 is live; start the flow again. --rollback returns to generation 1\n" in err

    assert run(monkeypatch, "inspect", f"{module}:changed", "--store", f"sqlite://{tmp_path}/s.db") == Exit.DONE
    said = capsys.readouterr()
    assert "25" in said.out
    assert "stage aircraft, generation 2: " in said.err
    assert said.err.rstrip().endswith(": minutes, too")
    assert " swap of generation 2 by " in said.err
    assert "generation 1 is live\n" in replay("flow", "--rollback", "--reason", "a mistake")[1]
    assert "--accept no-rollback" in replay("flow", "--drop", "2", "--reason", "a mistake", code=Exit.REFUSED)[1]
    err = replay("flow", "--drop", "2", "--accept", "no-rollback", "--reason", "a mistake")[1]
    assert " drop of generation 2 by " in err
    assert (
        run(monkeypatch, "snapshot", f"{module}:flow", "--to", "s", "--store", f"sqlite://{tmp_path}/s.db") == Exit.DONE
    )
    capsys.readouterr()
    out, err = replay("flow", "--snapshot", "s")
    assert [line.split() for line in out.splitlines() if line.startswith(name)] == [[name, "0", "10", "10", "0", "0"]]
    assert (
        f"the rebuild begins with the snapshot {tmp_path}/s\ngeneration 1 is live; --apply rebuilds generation 3\n"
        in err
    )
    assert replay("flow", "--apply", "--snapshot", "s", *local)[1].count("0 records in 0 batches") == 1
    assert replay("flow", "--apply", "--outputs", "maybe", *local, code=Exit.USAGE)[1].count("give send or drop") == 1
    assert " abandon of generation 3 by " in replay("flow", "--abandon", "--reason", "-")[1]
    assert "no generation is being rebuilt" in replay("flow", "--abandon", "--reason", "-", code=Exit.REFUSED)[1]

    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_records([TopicPartition(name, 0, 4)])[TopicPartition(name, 0)].result(30)
    out, err = replay("flow")
    lines = [line.split(None, 5) for line in out.splitlines() if line.startswith(name)]
    assert lines == [[name, "0", "0", "10", "6", "4 (0 to 3)"]]
    assert (
        f"--apply would be refused: flow fleet: {name}:0 has to be read from offset 0 on, but offsets 0 to 3 were deleted"
        in err
    )
    assert "(--accept lost-records)\ngeneration 1 is live" in err
    told = json.loads(replay("flow", "--json")[0])
    assert (told["ranges"][0]["first"], [one["risk"] for one in told["refused"]]) == (4, ["lost-records"])
    assert "--accept lost-records" in replay("flow", "--apply", *local, code=Exit.REFUSED)[1]
    assert "would be refused" not in replay("flow", "--accept", "lost-records")[1]
