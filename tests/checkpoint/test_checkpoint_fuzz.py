"""Headers that nobody thought of: no exception but CheckpointError, and the same verdict as safetensors' own parser."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import safetensors
from fuzz_headers import fuzz_file, fuzz_text, parse_file
from header_writer import data_of, entries, framed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from probe_cli.dtypes import DTYPE_BITS

HOSTILE = Path(__file__).parents[1] / "hostile"
FAST = settings(max_examples=50, derandomize=True, deadline=None)

names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPE_BITS))
tensors = st.dictionaries(names.filter(lambda name: name != "__metadata__"), st.tuples(dtypes, shapes), max_size=6)
#: Last dimensions of sub-byte dtypes fill whole bytes.
whole = tensors.map(lambda found: {n: (d, s if DTYPE_BITS[d] % 8 == 0 else (*s, 4)) for n, (d, s) in found.items()})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def verdict_of_safetensors(content: bytes) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    try:
        return {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


metadata_maps = st.dictionaries(names, st.text(max_size=5), max_size=2)
separator_pairs = st.sampled_from([(",", ":"), (", ", ": ")])


@given(whole, metadata_maps, separator_pairs, st.booleans())
@FAST
def test_well_formed_headers_open(found, metadata, separators, ascii_only) -> None:  # type: ignore[no-untyped-def]
    text = json.dumps(entries(found, metadata), separators=separators, ensure_ascii=ascii_only)
    content = framed(text.encode(), data_of(found))
    header = parse_file(content)
    assert header is not None
    assert {name: (dtype, shape) for _, _, name, dtype, shape in header.records} == found
    assert header.metadata == metadata and header.file_size == len(content)
    fuzz_file(content)
    assert verdict_of_safetensors(content) == found


@given(whole, st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=3), st.booleans())
@FAST
def test_flipped_bytes(found, flips, cut) -> None:  # type: ignore[no-untyped-def]
    text = json.dumps(entries(found, {"format": "pt"}), separators=(",", ":"))
    content = bytearray(framed(text, data_of(found)))
    for at, value in flips:
        content[at % len(content)] = value
    if cut:
        del content[flips[0][0] % len(content) :]
    fuzz_file(bytes(content))


@given(whole, names, st.sampled_from(["dtype", "shape", "data_offsets", None]), json_values)
@FAST
def test_wrong_values(found, name, field, value) -> None:  # type: ignore[no-untyped-def]
    header = entries({**found, name: ("U8", (2,))})
    if field is None:
        header[name] = value
    else:
        header[name][field] = value
    content = framed(json.dumps(header).encode("utf-8", "surrogatepass"), b"\1\2" + data_of(found))
    fuzz_file(content)


@given(st.binary(max_size=64))
@example(b"")
@FAST
def test_any_bytes(content) -> None:  # type: ignore[no-untyped-def]
    fuzz_file(content)
    fuzz_file(framed(b"{" + content))
    fuzz_text(content)


@given(json_values, st.booleans())
@FAST
def test_any_json_as_index_or_wire(value, wrapped) -> None:  # type: ignore[no-untyped-def]
    for document in (value, {"weight_map": value}, {"weight_map": {"a": value}}, [value], [["a", "U8", value]]):
        fuzz_text(json.dumps(document, ensure_ascii=wrapped).encode("utf-8", "surrogatepass"))


#: Where we are stricter than safetensors 0.8 on purpose, and why.
STRICTER = {
    "duplicate_tensor": "one of the two would be lost",
    "duplicate_by_escape": "one of the two would be lost",
    "duplicate_metadata_key": "one of the two would be lost",
    "extra_field": "safetensors ignores it; a field that we do not know may change what the others mean",
    "entry_list": "the format says object; field names would go unchecked",
    "metadata_null": "the format says map of strings",
    "newline_in_name": "breaks lines of messages and tables",
    "terminal_escape_in_name": "reaches a terminal",
    "long_name": "a cap of ours",
    "long_entry": "a cap of ours",
    "shape_rank": "a cap of ours",
    "no_tensors": "nothing to check is trouble",
    "metadata_alone": "nothing to check is trouble",
}


def test_case_28_verdicts_agree_with_safetensors() -> None:
    disagreements = {}
    for path in sorted((HOSTILE / "headers").iterdir()):
        ours = path.stem.startswith("ok_")
        theirs = verdict_of_safetensors(path.read_bytes()) is not None
        if ours != theirs:
            disagreements[path.stem] = theirs
    assert disagreements.pop("ok_header_only") is False
    assert set(disagreements) <= set(STRICTER), {k for k in disagreements if k not in STRICTER}
    assert all(disagreements.values()), "what safetensors refuses must not open here"


def test_hostile_files_are_a_corpus_for_the_fuzz_entry() -> None:
    assert importlib.util.find_spec("fuzz_headers") is not None
    for path in sorted((HOSTILE / "headers").iterdir()):
        fuzz_file(path.read_bytes())
        fuzz_text(path.read_bytes())
