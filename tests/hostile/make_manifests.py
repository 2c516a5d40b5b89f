"""Write the hostile manifests of this folder: each one fault, each with the message it must be refused with.

Run from the repository: `python tests/hostile/make_manifests.py`. The files are what the tests read.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from probe_cli.manifest import digest
from tests.manifest.samples import dense_bundle, dense_manifests

FOLDER = Path(__file__).parent / "manifests"
TEXT = dense_manifests()[0].to_bytes()
INDEX = dense_bundle().index_bytes()


def edited(change: Callable[[dict[str, Any]], object], text: bytes = TEXT) -> bytes:
    """The document after `change`, with the digest put right again: the fault is in the content, not in the digest."""
    document = json.loads(text)
    change(document)
    document.pop("digest", None)
    document["digest"] = digest(document)
    return json.dumps(document).encode()


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        place: Any = document
        for key in keys:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


APPLICATION = "layers/0/applications/0"
CASES: dict[str, tuple[bytes, str]] = {
    "empty.json": (b"", "the file is empty"),
    "not_json.json": (b"checkpoint: model", "not valid JSON"),
    "array_at_top.json": (b"[]", "is a list, expected a manifest"),
    "no_format.json": (b'{"version":"1.0"}', "states no format"),
    "other_format.json": (b'{"format":"safetensors","version":"1.0"}', "states format 'safetensors'"),
    "no_version.json": (edited(put("version", None)), "version is ''"),
    "odd_version.json": (edited(put("version", "1.0.0-beta")), "version is '1.0.0-beta'"),
    "newer_major.json": (edited(put("version", "10.0")), "of a newer major version than 1.1"),
    "older_major.json": (edited(put("version", "0.9")), "of an older major version than 1.1"),
    "truncated.json": (TEXT[: len(TEXT) // 2], "not valid JSON"),
    "truncated.json.gz": (gzip.compress(TEXT, mtime=0)[:300], "the gzip data ends early"),
    "damaged.json.gz": (gzip.compress(TEXT, mtime=0)[:-6] + b"\0\0\0\0\0\0", "damaged gzip data"),
    "two_members.json.gz": (gzip.compress(TEXT, mtime=0) * 2, "follow the gzip data"),
    "bomb.json.gz": (
        # 160 MB of spaces in 160 KB.
        gzip.compress(b'{"format":"probe-manifest/rank"' + b" " * (160 << 20) + b"}", mtime=0),
        "unpacks to more than 134,217,728 bytes",
    ),
    "deep_selectors.json.gz": (
        gzip.compress(TEXT.replace(b'"loaded_shard_id":0', b'"loaded_shard_id":' + b"[" * 200_000), mtime=0),
        "nested too deeply",
    ),
    "deep_unknown.json.gz": (gzip.compress(b'{"novel":' + b'{"a":' * 200_000, mtime=0), "nested too deeply"),
    "many_values.json.gz": (
        gzip.compress(
            b'{"novel":[' + b"[]," * 12_000_000 + b"[]]," + json.dumps(json.loads(TEXT)).encode()[1:],
            mtime=0,
        ),
        "more than 10,000,000 values",
    ),
    "long_name.json": (edited(put("sources/0/name", "x" * 5000)), "length <= 4096"),
    "edited.json": (TEXT.replace(b'"loaded_shard_id":0', b'"loaded_shard_id":1'), "it was edited or damaged"),
    "no_digest.json": (TEXT.replace(b'"digest":"' + json.loads(TEXT)["digest"].encode() + b'",\n', b""), "states ''"),
    "extra_field.json": (TEXT.replace(b'"version":"1.1"', b'"version":"1.1","z":0'), "it was edited or damaged"),
    "wrong_type.json": (edited(put(f"{APPLICATION}/count", "one")), "Expected `int`, got `str` - at `$.layers[0].app"),
    "count_zero.json": (edited(put(f"{APPLICATION}/count", 0)), "Expected `int` >= 1"),
    "negative_shape.json": (edited(put("sources/0/shape", [-1, 8])), "Expected `int` >= 0"),
    "overflowing_shape.json": (edited(put("sources/0/shape", [2**40, 2**40])), "more than 2^59 elements"),
    "huge_size.json": (edited(put("sources/0/shape", [2**70])), "Expected `int`"),
    "many_dimensions.json": (edited(put("sources/0/shape", [1] * 65)), "length <= 64"),
    "unknown_dtype.json": (edited(put("sources/0/dtype", "F7")), "unknown dtype 'F7'"),
    "file_index.json": (edited(put("sources/0/file", 7)), "file 7 is not among the 1 files"),
    "source_twice.json": (
        edited(lambda d: d["sources"].append(d["sources"][0])),
        "'model.layers.0.mlp.gate_proj.weight' is there twice",
    ),
    "layer_twice.json": (edited(lambda d: d["layers"].append(d["layers"][0])), "is there twice"),
    "tensor_twice.json": (
        edited(lambda d: d["layers"][0]["tensors"].append(d["layers"][0]["tensors"][0])),
        "is there twice",
    ),
    "unknown_source.json": (edited(put(f"{APPLICATION}/sources", ["gone"])), "reads 'gone', which is not among"),
    "unknown_tensor.json": (edited(put(f"{APPLICATION}/tensor", "gone")), "writes 'gone', which it does not own"),
    "foreign_write.json": (edited(put(f"{APPLICATION}/writes/0/tensor", "a.b")), "goes to 'a.b', which no layer owns"),
    "source_number.json": (edited(put(f"{APPLICATION}/writes/0/source", 3)), "reads source 3 of 1"),
    "view_outside.json": (
        edited(put(f"{APPLICATION}/writes/0/dst", [40, [4, 8], [8, 1]])),
        "the destination view reaches element 71 of 64",
    ),
    "read_outside.json": (
        edited(put(f"{APPLICATION}/writes/0/src", [0, [8, 8], [9, 1]])),
        "the source view reaches element 70 of 64",
    ),
    "view_ragged.json": (edited(put(f"{APPLICATION}/writes/0/src", [0, [8, 8], [1]])), "2 sizes and 1 strides"),
    "rank_outside.json": (edited(put("rank/index", 2)), "rank.index: 2 is not in this topology of 2 ranks"),
    "rank_coordinates.json": (edited(put("rank/tp", 2)), "rank.tp: 2 is not below tp=2"),
    "rank_topology.json": (edited(put("rank/topology/tp", 4)), "differs from the topology"),
    "topology_zero.json": (edited(put("topology/tp", 0)), "tp must be at least 1, got 0"),
    "topology_huge.json": (
        edited(lambda d: (put("topology/tp", 10**9)(d), put("rank/topology/tp", 10**9)(d))),
        "more than 100,000 ranks",
    ),
    "index_escaping.json": (edited(put("ranks/0/file", "../rank-00000.json.gz"), INDEX), "is not a rank's file name"),
    "index_rank_twice.json": (
        edited(put("ranks/1/rank", json.loads(INDEX)["ranks"][0]["rank"]), INDEX),
        "is there twice",
    ),
    "index_file_twice.json": (edited(put("ranks/1/file", "rank-00000.json.gz"), INDEX), "is there twice"),
    "index_no_ranks.json": (edited(put("ranks", []), INDEX), "the bundle has no rank"),
    "index_unknown_unused.json": (edited(put("unused/skipped", ["gone"]), INDEX), "'gone' is not among the sources"),
    "index_unknown_unfed.json": (
        edited(put("unfed", {"a.b": [9]}), INDEX),
        "names a rank that the bundle does not hold",
    ),
    "index_bad_digest.json": (edited(put("ranks/0/digest", "md5:1"), INDEX), "matching regex"),
    "not_utf8.json": (TEXT.replace(b"sample", b"s\xff\xfele"), "Invalid UTF-8"),
    "lone_surrogate.json": (TEXT.replace(b'"name":"sample"', rb'"name":"\ud800"'), "not valid JSON"),
    "terminal_escape.json": (b'{"format":"\\u001b[2Jmanifest","version":"1.0"}', r"states format '?[2Jmanifest'"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (data, _) in CASES.items():
        (FOLDER / name).write_bytes(data)
    expected = {name: message for name, (_, message) in CASES.items()}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
