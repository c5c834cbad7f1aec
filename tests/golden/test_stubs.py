from importlib.metadata import version
from pathlib import Path

import pytest

import envelope.envelope_pb2
import jobs.demo.leg_pb2

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "headwater/envelope/v1/envelope.proto": envelope.envelope_pb2,
    "headwater/demo/v1/leg.proto": jobs.demo.leg_pb2,
}


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("suffix", ["py", "pyi"])
def test_the_stubs_are_those_that_the_schema_generates(schema: str, suffix: str, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    assert version("grpcio-tools") == "1.76.0"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", schema]
    assert protoc.main(arguments) == 0
    stub = Path(SCHEMAS[schema].__file__).with_suffix(f".{suffix}")
    generated = (tmp_path / schema).parent / stub.name
    assert stub.read_text() == generated.read_text(), "run `make proto`"
