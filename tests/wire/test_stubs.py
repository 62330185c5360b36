"""The generated stubs in the tree are what the .proto files generate today."""

import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

PROTO = Path(__file__).parents[2] / "proto"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.mark.parametrize("name", sorted(path.stem for path in (PROTO / "forebay_wire" / "v1").glob("*.proto")))
def test_stubs_are_current(name: str, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    arguments += [f"--plugin=protoc-gen-{plugin}={scripts}/protoc-gen-{plugin}" for plugin in ("mypy", "mypy_grpc")]
    arguments += [f"--mypy_out=quiet:{tmp_path}", f"--mypy_grpc_out=quiet:{tmp_path}", f"forebay_wire/v1/{name}.proto"]
    assert protoc.main(arguments) == 0
    for suffix in SUFFIXES:
        file = Path("forebay_wire", "v1", name + suffix)
        assert (PROTO / file).read_bytes() == (tmp_path / file).read_bytes(), f"{file}: run `make protos`"
