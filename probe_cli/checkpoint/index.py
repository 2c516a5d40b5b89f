"""The index of a sharded checkpoint: which file holds which tensor."""

from __future__ import annotations

from pathlib import PurePosixPath

import msgspec

from probe_cli.checkpoint.strict_json import Fault, Reader
from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.errors import CheckpointError

__all__ = ["MAX_INDEX", "parse_index"]

#: Bytes. 100,000 tensors take about 8 million.
MAX_INDEX = 64_000_000
_MAX_VALUE = 65_536
_MAX_TENSORS = 3_000_000
_MAX_FILE_NAME = 512


class _Index(msgspec.Struct):
    weight_map: msgspec.Raw


def parse_index(text: str, *, file: str) -> dict[str, str]:
    """The `weight_map` of an index, with file names checked. Raises CheckpointError."""
    # No entry is shorter than `"a":"b.safetensors",`: many short strings would cost far more memory than their bytes.
    if len(text) > 1_000_000 and text.count('"') * 5 > len(text):
        raise CheckpointError(f"{file}: is not an index, expected a map from tensor to file")
    weight_map = _parse_quickly(text)
    if weight_map is None:
        weight_map = _parse(text, file)
    if not weight_map:
        raise CheckpointError(f"{file}: weight_map is empty, expected at least one tensor")
    checked: set[str] = set()
    for name, target in weight_map.items():
        if target not in checked:
            if not _is_inside(target):
                raise CheckpointError(
                    f"{file}: weight_map of {quote(name)} names {quote(target)}, "
                    "expected a .safetensors file in the folder",
                    hint="the index is damaged or hostile: do not use it",
                )
            checked.add(target)
    return weight_map


def _parse_quickly(text: str) -> dict[str, str] | None:
    """The map of an index that a known writer wrote; None leaves the judgement to `_parse`."""
    if "\\" in text or text.count('"weight_map"') != 1:
        return None
    try:
        raw = bytes(msgspec.json.decode(text, type=_Index).weight_map)
        weight_map = msgspec.json.decode(raw, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # Without escapes quotes only delimit: more than four per distinct key mean that a key stands twice.
    return weight_map if raw.count(b'"') == 4 * len(weight_map) else None


def _parse(text: str, file: str) -> dict[str, str]:
    weight_map: dict[str, str] | None = None
    reader = Reader(text)
    try:
        for key in reader.members("the index"):
            if key == "weight_map":
                weight_map = reader.string_map("weight_map", _MAX_TENSORS)
            else:
                reader.value(_MAX_VALUE)
        reader.end()
    except Fault as fault:
        raise CheckpointError(
            f"{file}: at character {fault.position:,}: {fault}", hint="the index is damaged: download it again"
        ) from None
    if weight_map is None:
        raise CheckpointError(f"{file}: has no 'weight_map', expected a map from tensor to file")
    return weight_map


def _is_inside(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and len(name) <= _MAX_FILE_NAME
        and is_plain(name)
        and not name.startswith("/")
        and "\\" not in name
        and ":" not in name
        and not {"..", "."} & set(PurePosixPath(name).parts)
    )
