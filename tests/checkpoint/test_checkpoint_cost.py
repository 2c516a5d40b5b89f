"""What a hostile or a huge header may cost: memory is bounded by its length, and nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import header_writer
import pytest
from header_writer import framed, write

from probe_cli.checkpoint import entries, quick
from probe_cli.checkpoint.header import parse_header
from probe_cli.errors import CheckpointError

#: Peak resident memory that opening the file adds, in bytes; the error's first line.
OPEN = """
import resource, sys
from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(Checkpoint.open(sys.argv[1]))
except CheckpointError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
MEGABYTE = 1_000_000


def run(code: str, path: Path) -> list[str]:
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":[' + b"[]," * 3 * MEGABYTE + b"[]]}", "tensor 'a': a value is malformed or longer than 16,384"),
        (
            b'{"a":{"dtype":"U8","shape":[' + b"1," * 4 * MEGABYTE + b"1]}}",
            "tensor 'a': a value is malformed or longer",
        ),
        (b'{"__metadata__":{"k":[' + b"[]," * 3 * MEGABYTE + b"[]]}}", "expected a string as the value of 'k'"),
        (b'{"__metadata__":{"k":"' + b"\\u0041" * 1_500_000 + b'"}}', "no tensors"),
        (b"{" + b"[" * 9 * MEGABYTE, "expected a string as a key of the header"),
        (b'{"a":' + b"[" * 9 * MEGABYTE, "tensor 'a': nested too deeply"),
        (b'{"' + b"n" * 9 * MEGABYTE + b'":1}', "name is longer than 2,048 characters"),
        (b'{"a1":0,' + b'"a1":0,' * MEGABYTE + b'"b":0}', "tensor 'a1': is 0, expected an object"),
        (b"{" + b" " * 9 * MEGABYTE, "expected a string as a key of the header"),
    ],
    ids=["lists", "shape", "metadata_lists", "metadata_escapes", "brackets", "nesting", "name", "numbers", "spaces"],
)
def test_case_28_memory_is_bounded_by_the_length(tmp_path: Path, body: bytes, expected: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(framed(body))
    message, added = run(OPEN, path)
    assert expected in message
    # Bytes of the file, its JSON, the text (up to 4 bytes a character) and a window of it.
    assert int(added) < 8 * len(body) + 20 * MEGABYTE


def test_numbers_of_tensors_and_of_metadata_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (entries, quick):
        monkeypatch.setattr(module, "MAX_TENSORS", 4)
        monkeypatch.setattr(module, "MAX_METADATA", 4)
    tensors = {f"t{at}": ("U8", (0,)) for at in range(5)}
    pairs = {f"k{at}": "" for at in range(5)}
    for header, expected in (
        (header_writer.entries(tensors), "more than 4 tensors in one file"),
        (header_writer.entries({}, pairs), "__metadata__ has more than 4 members"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            parse_header(framed(json.dumps(header, separators=(",", ":"))), file="x")
    parse_header(framed(json.dumps(header_writer.entries(dict(list(tensors.items())[:4])))), file="x")


def test_announced_length_costs_nothing(tmp_path: Path) -> None:
    """100 MB announced, a few bytes there: nothing is read or reserved for it."""
    path = tmp_path / "m.safetensors"
    path.write_bytes((100_000_000).to_bytes(8, "little") + b"{}")
    message, added = run(OPEN, path)
    assert "header length is 100,000,000 bytes, but the file ends after 10 bytes" in message
    assert int(added) < 5 * MEGABYTE


def test_import_and_use_are_light(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": ("U8", (3,))})
    code = (
        "import sys; from probe_cli.checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]).digest;"
        "heavy = {'torch', 'numpy', 'huggingface_hub', 'safetensors', 'httpx', 'requests', 'dataclasses', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(code, path) == ["[]"]
