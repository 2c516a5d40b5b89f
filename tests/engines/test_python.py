"""`--engine python:`: the user's own factory, and every way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_cli import Checkpoint, Rank, Topology
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.registry import create_engine, default_engine_name, engine_names
from probe_cli.errors import EngineError, UsageError
from probe_cli.probe import build_rank

GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, config, rank, width):
        super().__init__()
        self.proj = nn.Linear(width, width // rank.tp_size, bias=False)
        self.config, self.rank = config, rank

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "proj.weight":
                rows = self.proj.weight.shape[0]
                self.proj.weight.data.copy_(tensor.narrow(0, self.rank.tp * rows, rows))

def make(config, rank, width=4):
    return Model(config, rank, width)

def raises(config, rank):
    raise ValueError("no such quantization")

def number(config, rank):
    return 3

def bare(config, rank):
    return nn.Linear(2, 2)

not_callable = 5
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "serving.py"
    path.write_text(GOOD)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "names.json").write_text('[["proj.weight", "F32", [8, 8]], ["stray", "F32", [1]]]')
    return Checkpoint.from_wire(tmp_path / "names.json")


def test_file_factory_with_arguments(module: Path, checkpoint: Checkpoint) -> None:
    engine = create_engine(f"python:{module}:make", EngineOptions(arguments={"width": 8}))
    result = build_rank(engine, checkpoint, Topology(tp=2).rank(1), verify=True)
    (application,) = result.manifest.layer("proj").applications
    assert application.direct
    assert application.writes[0].src.offset == 32
    assert result.unused == {"stray": "skipped"}
    assert result.manifest.engine.arguments == {"factory": "serving.py:make", "width": 8}


def test_identity_changes_with_the_code(module: Path) -> None:
    before = create_engine(f"python:{module}:make", EngineOptions()).identity
    module.write_text(GOOD + "\n# changed\n")
    assert create_engine(f"python:{module}:make", EngineOptions()).identity.version != before.version


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("missing", {}, UsageError, "missing does not exist in"),
        ("not_callable", {}, UsageError, "not_callable is not callable"),
        ("make", {"depth": 2}, UsageError, r"cannot be called as factory\(config, rank, depth=...\)"),
        ("raises", {}, EngineError, "failed for rank 0: ValueError: no such quantization"),
        ("number", {}, EngineError, "returned a int, not an nn.Module"),
        ("bare", {}, EngineError, "returned a Linear without load_weights"),
    ],
)
def test_wrong_factories(
    module: Path, checkpoint: Checkpoint, name: str, arguments: dict, error: type[Exception], message: str
) -> None:
    engine = create_engine(f"python:{module}:{name}", EngineOptions(arguments=arguments))
    with pytest.raises(error, match=message):
        engine.materialize(checkpoint, Rank())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("python", "expected python:package.module:factory"),
        ("python:onlymodule", "expected python:package.module:factory"),
        ("python:..relative:make", "expected python:package.module:factory"),
        ("python:no/such/file.py:make", "there is no file no/such/file.py"),
        ("nonsense", r"no engine 'nonsense'; there are .*embedded.*python"),
    ],
)
def test_wrong_references(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_engine(spec, EngineOptions())


def test_unknown_module_and_broken_module(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no module no_such_package\.thing"):
        create_engine("python:no_such_package.thing:make", EngineOptions()).warm_up()
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_dependency\n")
    with pytest.raises(EngineError, match="ModuleNotFoundError: No module named 'no_such_dependency'"):
        create_engine(f"python:{broken}:make", EngineOptions()).warm_up()


@pytest.mark.parametrize(("code", "reason"), [("0", "SystemExit: 0"), ("", "SystemExit"), ("'bye'", "SystemExit: bye")])
def test_a_module_that_exits_when_imported_has_failed(tmp_path: Path, code: str, reason: str) -> None:
    """`sys.exit(0)` in it ended `build` with exit code 0, and nothing was built."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    with pytest.raises(EngineError, match=f"cannot be imported: {reason}$"):
        create_engine(f"python:{script}:make", EngineOptions()).warm_up()


def test_registry_names_and_default(tmp_path: Path) -> None:
    assert {"embedded", "python", "vllm"} <= set(engine_names())
    (tmp_path / "names.json").write_text('[["a", "F32", [1]]]')

    def wire(config: dict | None) -> Checkpoint:
        return Checkpoint.from_wire(tmp_path / "names.json", config=config)

    assert default_engine_name(wire({"model_type": "qwen3_moe"})) == "embedded"
    with pytest.raises(UsageError, match="do not know model_type 'gpt2'; name an engine") as raised:
        default_engine_name(wire({"model_type": "gpt2"}))
    assert "probe-manifest[vllm]" in raised.value.hint
    with pytest.raises(UsageError, match=r"no config\.json"):
        default_engine_name(wire(None))
