"""A diff folds for people and is complete for machines; in a comment it is bounded."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest.diff import DiffReport, DiffSide, diff
from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_patch import apply_rank
from probe_cli.report.diff_json import diff_json
from probe_cli.report.diff_markdown import diff_markdown
from probe_cli.report.diff_text import diff_text
from probe_cli.report.diff_textconv import textconv
from tests.manifest import corpus
from tests.manifest.test_diff import CHANGES, plain

SIDES = (DiffSide("a", "bundle", "sha256:" + "1" * 64, (0, 1)), DiffSide("b", "bundle", "sha256:" + "2" * 64, (0, 1)))
EXPERTS = tuple(
    Change(
        kind="source-renamed",
        subject=f"layers.{i}.experts.{e}.w.scale_inv",
        old={"name": f"layers.{i}.experts.{e}.w.scale_inv", "dtype": "F32", "shape": [1]},
        new={"name": f"layers.{i}.experts.{e}.w.scale", "dtype": "F32", "shape": [1]},
        at=i * 8 + e,
    )
    for i in range(3)
    for e in range(8)
)
TORCH = Change(kind="torch-changed", subject="engine.torch", old=["2.13.0"], new=["2.14.0"])
TARGET = Change(kind="target-changed", subject="engine.target", new=["cuda:sm90"])
COUNTS = tuple(
    Change(
        kind="count-changed",
        subject=f"s.{i}",
        rank=rank,
        layer=f"l.{i}",
        into=f"l.{i}.w",
        new={"count": 3},
        old={},
        at=0,
    )
    for rank in range(4)
    for i in range(2)
)


def test_text_folds_names_and_ranks() -> None:
    report = DiffReport(*SIDES, (*EXPERTS, TORCH, TARGET, *COUNTS))
    assert diff_text(report).splitlines() == [
        "old a: bundle, ranks 0,1, sha256:111111111111",
        "new b: bundle, ranks 0,1, sha256:222222222222",
        "breaking source-renamed layers.{0-2}.experts.{0-7}.w.scale_inv (24): scale_inv -> scale",
        "breaking target-changed engine.target: none -> cuda:sm90",
        "breaking count-changed s.{0,1} (2) -> l.{0,1}.w: count: 1 -> 3 [ranks 0-3]",
        "cosmetic torch-changed engine.torch: 2.13.0 -> 2.14.0",
        "33 breaking, 1 cosmetic",
    ]


def test_text_lists_every_change_if_asked() -> None:
    lines = diff_text(DiffReport(*SIDES, COUNTS), verbose=True).splitlines()
    assert lines[2:-1] == [
        f"breaking count-changed s.{i} -> l.{i}.w: count: 1 -> 3 [rank {rank}]" for rank in range(4) for i in range(2)
    ]


def test_equal_inputs_say_so() -> None:
    assert diff_text(DiffReport(*SIDES, ())).splitlines()[-1] == "no difference"


def test_what_repeats_for_a_rank_is_told_once() -> None:
    echo = msgspec.structs.replace(TORCH, rank=0, echo=True)
    text = diff_text(DiffReport(*SIDES, (TORCH, echo)))
    assert text.count("torch-changed") == 1
    assert json.loads(diff_json(DiffReport(*SIDES, (TORCH, echo))))["counts"]["cosmetic"] == 1


def test_json_is_a_patch(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(corpus.write(tmp_path, corpus.tensors()))
    old = corpus.manifests(checkpoint)[0]
    new = corpus.manifests(checkpoint, change=CHANGES["selectors-changed"])[0]
    document = json.loads(diff_json(diff(old, new)))
    assert (document["format"], document["version"], document["worst"]) == ("probe-manifest/diff", "1.0", "breaking")
    (row,) = document["changes"]
    assert (row["class"], row["section"]) == ("breaking", "selectors")
    assert row["reason"] == "selectors are part of the key: the old one never arrives"
    changes = [msgspec.convert(row, Change) for row in document["changes"]]
    assert apply_rank(plain(old), changes, 0)["layers"] == plain(new)["layers"]


def test_markdown_opens_what_breaks_and_folds_the_rest() -> None:
    text = diff_markdown(DiffReport(*SIDES, (*EXPERTS, TORCH)))
    head, _, folded = text.partition("<details>")
    assert "| source-renamed | `layers.{0-2}.experts.{0-7}.w.scale_inv` (24) | scale_inv -> scale |  |" in head
    assert "torch-changed" in folded
    assert "- `source-renamed`: the old contract waits for the old name" in folded


@pytest.mark.parametrize("kind", ["source-removed", "torch-changed"])
def test_markdown_is_bounded(kind: str) -> None:
    many = tuple(
        Change(kind=kind, subject="x" * 200 + f".a{n}b{n * 7}.{n * n}.y", old=[str(n)], new=[str(n + 1)])
        for n in range(3000)
    )
    text = diff_markdown(DiffReport(*SIDES, many))
    assert len(text) <= 60_000
    assert "that do not fit here" in text
    assert text.count("<details>") == text.count("</details>")


def test_textconv_has_a_fact_to_a_line(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(corpus.write(tmp_path, corpus.tensors()))
    bundle = corpus.bundle(checkpoint)
    lines = textconv(bundle.manifest(1)).splitlines()
    name = "model.layers.0.self_attn"
    assert f"layer {name}.qkv_proj (QKVParallelLinear)" in lines
    assert f"  {name}.qkv_proj.weight BF16 [12, 8]" in lines
    at = lines.index(f"  {name}.k_proj.weight -> {name}.qkv_proj.weight [loaded_shard_id=k]")
    assert lines[at + 1] == "    from 32+[4, 8] by [8, 1], to 32+[4, 8] by [8, 1]"
    index = textconv(bundle).splitlines()
    assert "source model.mtp.0.proj.weight BF16 [8, 8], unused: skipped" in index
    assert bundle.digest not in textconv(bundle)
