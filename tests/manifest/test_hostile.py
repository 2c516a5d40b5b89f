"""Manifests are untrusted input: every file of the hostile folder is refused with one line that names file and field,
in bounded time and memory. `tests/hostile/make_manifests.py` makes the files."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from probe_cli.errors import ManifestError
from probe_cli.manifest import Bundle, Manifest

FOLDER = Path(__file__).parents[1] / "hostile" / "manifests"
EXPECTED: dict[str, str] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def test_every_file_has_its_message() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {*EXPECTED, "expected.json"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_hostile_file_is_refused_with_its_message(name: str) -> None:
    read = Bundle.read if name.startswith("index_") else Manifest.read
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError) as error:
            read(FOLDER / name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert EXPECTED[name] in message
    assert message.startswith(str(FOLDER / name))
    assert message.isprintable()
    assert len(message) < 700
    assert peak < 400 << 20
