"""Case 28: headers that lie. Each file of tests/hostile/headers gets one clear line, or opens if it is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.entries import parse_entries
from probe_cli.checkpoint.quick import parse_quickly
from probe_cli.errors import CheckpointError

HOSTILE = Path(__file__).parents[1] / "hostile"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_headers", HOSTILE / "make_headers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES: dict[str, tuple[bytes, str]] = _load().CASES
BAD = [name for name in CASES if not name.startswith("ok_")]
GOOD = [name for name in CASES if name.startswith("ok_")]


def test_folder_is_what_the_script_writes() -> None:
    committed = {path.stem: path.read_bytes() for path in (HOSTILE / "headers").iterdir()}
    assert committed == {name: content for name, (content, _) in CASES.items()}


@pytest.mark.parametrize("name", BAD)
def test_case_28_refused_in_one_line(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(HOSTILE / "headers" / f"{name}.safetensors")
    message = str(caught.value)
    assert CASES[name][1] in message
    assert message.startswith(f"{name}.safetensors: ")
    assert message.isprintable() and len(message) < 500
    assert caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize("name", GOOD)
def test_odd_but_right_opens(name: str) -> None:
    checkpoint = Checkpoint.open(HOSTILE / "headers" / f"{name}.safetensors")
    assert checkpoint.nbytes in (2, 4)
    assert [len(checkpoint.read(s)) for s in checkpoint.sources if checkpoint.has_data(s)] == [
        s.nbytes for s in checkpoint.sources if checkpoint.has_data(s)
    ]
    assert all(map(checkpoint.has_data, checkpoint.sources)) is (name != "ok_header_only")


@pytest.mark.parametrize("name", sorted(CASES))
def test_quick_road_vouches_only_for_what_the_careful_road_accepts(name: str) -> None:
    body = CASES[name][0][8:]
    header = body[: int.from_bytes(CASES[name][0][:8], "little")]
    quick = parse_quickly(header) if header.startswith(b"{") else None
    if quick is not None:
        assert quick == parse_entries(header.decode(), file=name)
