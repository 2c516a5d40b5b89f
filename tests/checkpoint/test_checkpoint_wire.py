"""Wire files: what a trainer will send (case 26 builds from them)."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.wire import parse_dtype
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError


@pytest.fixture
def wire(tmp_path: Path) -> Path:
    return tmp_path / "names.json"


ROWS = [("b.weight", "BF16", [4, 2]), ("a", "bfloat16", []), ("c", "torch.float8_e4m3fn", [0, 3])]


@pytest.mark.parametrize("form", ["object", "list", "mixed", "escaped"])
def test_forms(wire: Path, form: str) -> None:
    objects = [dict(zip(("name", "dtype", "shape"), row, strict=True)) for row in ROWS]
    document: object = {"object": objects, "list": ROWS, "mixed": [*objects[:1], *ROWS[1:]], "escaped": objects}[form]
    text = json.dumps(document)
    wire.write_text(text.replace("weight", "\\u0077eight") if form == "escaped" else text)
    checkpoint = Checkpoint.from_wire(wire, config={"model_type": "llama"})
    assert [(s.name, s.dtype, s.shape, s.nbytes, s.file) for s in checkpoint.sources] == [
        ("b.weight", "BF16", (4, 2), 16, None),
        ("a", "BF16", (), 2, None),
        ("c", "F8_E4M3", (0, 3), 0, None),
    ]
    assert (checkpoint.kind, checkpoint.root, checkpoint.files) == ("wire", None, ())
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.reordered("file").names() == ("b.weight", "a", "c")
    assert not checkpoint.has_data(checkpoint["b.weight"])
    with pytest.raises(CheckpointError, match=r"'b\.weight' is known from a wire file alone, expected its bytes"):
        checkpoint.read(checkpoint["b.weight"])


def test_standard_input_and_config_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(ROWS).encode())))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    checkpoint = Checkpoint.from_wire("-", config=tmp_path / "config.json")
    assert len(checkpoint) == 3 and checkpoint.config == {"model_type": "qwen3_moe"}


def test_every_torch_spelling_is_known() -> None:
    packed = {torch.float4_e2m1fn_x2}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and dtype not in packed and parse_dtype(str(dtype)) is not None:
            spelled = parse_dtype(name)
            assert spelled == parse_dtype(str(dtype))
            assert DTYPE_BITS[str(spelled)] == 8 * dtype.itemsize
    assert {parse_dtype(str(dtype)) for dtype in (torch.bfloat16, torch.uint64, torch.float8_e8m0fnu, torch.bool)} == {
        "BF16",
        "U64",
        "F8_E8M0",
        "BOOL",
    }


def test_pairs_of_4_bits_have_torch_shapes(wire: Path) -> None:
    wire.write_text('[["x", "float4_e2m1fn_x2", [3, 4]], ["y", "F4", [3, 8]]]')
    x, y = Checkpoint.from_wire(wire).sources
    assert (x.dtype, x.shape, x.nbytes) == (y.dtype, y.shape, y.nbytes) == ("F4", (3, 8), 12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a list of name, dtype and shape"),
        ("{}", "expected a list of name, dtype and shape"),
        ("[]", "is an empty list, expected at least one tensor"),
        ("[1]", "entry 0: is 1, expected name, dtype and shape"),
        ('[["a", "U8"]]', "entry 0: is ['a', 'U8'], expected name, dtype and shape"),
        ('[{"name": "a", "dtype": "U8"}]', "entry 0: lacks 'shape'"),
        ('[{"name": "a", "name": "b", "dtype": "U8", "shape": []}]', "duplicate key 'name'"),
        ('[["a", "U8", []], ["a", "U8", []]]', "entry 1: 'a' is entry 0 already, expected it once"),
        ('[["a", "U7", []]]', "entry 0 ('a'): dtype 'U7' is unknown, expected one of BOOL"),
        ('[["a", null, []]]', "entry 0: dtype of 'a' is None, expected a string"),
        ('[[1, "U8", []]]', "entry 0: name is 1, expected a string"),
        ('[["a", "U8", [-1]]]', "entry 0 ('a'): shape is [-1], expected at most 64 integers of 0 or more"),
        ('[["a", "U8", [1.5]]]', "entry 0: shape of 'a' is [1.5], expected a list of integers"),
        ('[["a", "U8", [true]]]', "entry 0: shape of 'a' is [True], expected a list of integers"),
        (
            '[["a", "U8", [4294967296, 4294967296]]]',
            "entry 0 ('a'): shape [4294967296, 4294967296] of U8 overflows",
        ),
        ('[["a", "F4", [3]]]', "entry 0 ('a'): shape [3] of F4 is 12 bits, expected whole bytes"),
        ('[["a\\nb", "U8", []]]', "entry 0: name is 'a\\nb', expected at most 2,048 printable characters"),
        ('[["a", "U8", [NaN]]]', "NaN is not JSON"),
        ('[["a", "U8", []], ', "entry 1: at character 18: malformed JSON"),
        ('[["a", "U8", []]] 1', "expected the end after the JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ('[["a", "' + "U" * 20_000 + '", [], 1]]', "a value is malformed or longer than 16,384 characters"),
        ("[" * 9000 + "]" * 9000, "nested too deeply"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_malformed(wire: Path, text: str, expected: str) -> None:
    wire.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_wire(wire)
    message = str(caught.value)
    assert message.startswith(f"{wire}: ") and expected in message and message.isprintable()


def test_no_such_wire_file(wire: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.from_wire(wire)
