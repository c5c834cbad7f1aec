from importlib.metadata import version
from pathlib import Path

import pytest

import envelope.envelope_pb2 as pb

ROOT = Path(__file__).parents[2]
SCHEMA = "headwater/envelope/v1/envelope.proto"


@pytest.mark.parametrize("stub", ["envelope_pb2.py", "envelope_pb2.pyi"])
def test_the_stubs_are_those_that_the_schema_generates(stub: str, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    assert version("grpcio-tools") == "1.76.0"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", SCHEMA]
    assert protoc.main(arguments) == 0
    generated = (tmp_path / SCHEMA).parent / stub
    assert Path(pb.__file__).with_name(stub).read_text() == generated.read_text(), "run `make proto`"
