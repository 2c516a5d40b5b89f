"""`show`, `explain`, `schema` and `selftest` on a bundle of TP2 + EP2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

from probe_cli import Bundle, Manifest

RANK_FIELDS = {
    *("rank", "tp", "pp", "ep", "dp", "layers", "tensors", "applications", "declined", "direct_writes", "computed"),
    *("gaps", "overlaps", "unfed", "sources_used", "bytes_read"),
}


def test_json_of_a_bundle(run, bundle: Path) -> None:
    document = run("show", bundle, "--format", "json").json
    assert document["kind"] == "bundle"
    assert (document["sources"], document["sources_unused"], document["tensors_unfed"]) == (69, 0, 0)
    assert [set(entry) for entry in document["ranks"]] == [RANK_FIELDS] * 2
    for entry, manifest in zip(document["ranks"], Bundle.read(bundle).manifests()):
        assert entry["rank"] == manifest.rank.index
        assert entry["applications"] == manifest.keys().total() == 45
        assert entry["sources_used"] == len(manifest.sources)
        # 8 experts of 3 tensors on 2 layers, half of them elsewhere.
        assert entry["declined"] == 24


def test_json_of_one_rank(run, bundle: Path) -> None:
    document = run("show", bundle, "--rank", "1", "--format", "json").json
    assert document["kind"] == "rank"
    assert [entry["rank"] for entry in document["ranks"]] == [1]
    assert document["digest"] == Manifest.read(bundle, rank=1).digest
    same = run("show", bundle / "rank-00001.json.gz", "--format", "json").json
    assert same == document


def test_layers_and_regions(run, bundle: Path) -> None:
    found = run("show", bundle, "--rank", "1", "--layer", "*.0.self_attn.qkv_proj")
    assert found.stdout.splitlines() == [
        "rank 1 (tp 1/2, ep 1/2)",
        "  model.layers.0.self_attn.qkv_proj: QKVLinear",
        "    weight: F32 64x64",
        "      model.layers.0.self_attn.k_proj.weight [loaded_shard_id=k]: [16:32, :] -> [32:48, :]",
        "      model.layers.0.self_attn.q_proj.weight [loaded_shard_id=q]: [32:64, :] -> [0:32, :]",
        "      model.layers.0.self_attn.v_proj.weight [loaded_shard_id=v]: [16:32, :] -> [48:64, :]",
    ]


def test_details_in_json(run, bundle: Path) -> None:
    document = run("show", bundle, "--source", "*.experts.5.up_proj.weight", "--format", "json").json
    assert [len(entry["details"]) for entry in document["ranks"]] == [0, 2]
    (application,) = document["ranks"][1]["details"][0]["applications"]
    assert application["selectors"]["shard_id"] == "w3"
    assert application["sources"] == ["model.layers.0.mlp.experts.5.up_proj.weight"]


def test_gaps_are_folded(run, bundle: Path) -> None:
    """250 words on two ranks: the second has six rows of padding."""
    lines = run("show", bundle, "--rank", "1", "--gaps").stdout.splitlines()
    assert lines[:4] == [
        "rank 1 (tp 1/2, ep 1/2)",
        "  model.embed_tokens.weight",
        "  lm_head.weight",
        "    F32 128x64: 384 elements never written: [122:128, :]",
    ]
    assert (
        run("show", bundle, "--overlaps").stdout
        == "rank 0 (tp 0/2, ep 0/2): nothing\nrank 1 (tp 1/2, ep 1/2): nothing\n"
    )


def test_nothing_matches(run, bundle: Path) -> None:
    found = run("show", bundle, "--layer", "decoder.*", "--source", "x*")
    assert (found.code, found.stdout) == (2, "")
    assert "error: nothing matches layer 'decoder.*' and source 'x*'" in found.stderr


def test_output_goes_to_a_file_in_one_step(run, bundle: Path, tmp_path: Path) -> None:
    found = run("show", bundle, "--format", "json", "--output", tmp_path / "out.json")
    assert (found.code, found.stdout) == (0, "")
    assert json.loads((tmp_path / "out.json").read_text())["sources"] == 69
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    refused = run("show", bundle, "--output", tmp_path / "no" / "such" / "folder.txt")
    assert refused.code == 2
    assert "no/such/folder.txt: cannot be written (No such file or directory)" in refused.stderr


def test_output_follows_a_link_and_writes_to_a_pipe_as_it_is(run, bundle: Path, tmp_path: Path) -> None:
    """Replacing what the name stands for would have turned /dev/null into a file."""
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    assert run("show", bundle, "--output", link).code == 0
    assert link.is_symlink()
    shown = target.read_text()
    assert "applications" in shown
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run("show", bundle, "--output", pipe).code == 0
    assert os.read(reader, 1 << 16).decode() == shown
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(("rank", "message"), [("7", "no rank 7 in this bundle"), ("-1", "-1")])
def test_a_rank_that_is_not_there(run, bundle: Path, rank: str, message: str) -> None:
    found = run("show", bundle, "--rank", rank)
    assert found.code == 2
    assert message in found.stderr


def test_explain_a_source(run, bundle: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert run("explain", bundle, name).stdout.splitlines() == [
        f"{name}: source, F32 32x64",
        "",
        "rank 0:",
        "  model.layers.1.mlp.experts (Experts)",
        "    w13: F32 4x64x64",
        f"      {name} [expert_id=3, shard_id=w3, weight_name=model.layers.1.mlp.experts.w13]: all -> [3, 32:64, :]",
        "    the layer is published when all of its 12 applications from 12 sources have arrived",
        "",
        "rank 1: does not need it",
    ]


def test_explain_what_feeds_a_tensor(run, bundle: Path) -> None:
    document = run("explain", bundle, "model.layers.0.self_attn.qkv_proj.weight", "--format", "json").json
    assert (document["kind"], document["source"]) == ("tensor", None)
    assert [target["rank"] for target in document["targets"]] == [0, 1]
    assert [len(target["applications"]) for target in document["targets"]] == [3, 3]
    assert document["shapes"]["model.layers.0.self_attn.k_proj.weight"] == [32, 64]


def test_explain_ranks_that_agree_share_a_section(run, bundle: Path) -> None:
    lines = run("explain", bundle, "model.norm.weight").stdout.splitlines()
    assert lines[2] == "ranks 0,1:"
    assert lines[-1] == "    the layer is published when this has arrived"


def test_explain_suggests(run, bundle: Path) -> None:
    found = run("explain", bundle, "model.layers.0.self_attn.qkv_prj.weight")
    assert found.code == 2
    assert "hint: close to it: model.layers.0.self_attn.qkv_proj.weight" in found.stderr


def test_schema_accepts_what_build_writes(run, bundle: Path, tmp_path: Path) -> None:
    schema = run("schema").json
    Manifest.read(bundle, rank=0).write(tmp_path / "rank.json")
    jsonschema.Draft202012Validator(schema).validate(json.loads((tmp_path / "rank.json").read_text()))


def test_selftest_detects_every_alteration(run, bundle: Path, checkpoint: Path) -> None:
    found = run("selftest", bundle, "--checkpoint", checkpoint, "--samples", "13", "--format", "json")
    assert found.code == 0, found.stderr
    document = found.json
    assert (document["detected"], document["detection_rate"]) == (document["trials"], 1.0)
    assert document["trials"] == 2 * 13 * 6
    trials = document["ranks"][1]["trials"]
    assert {trial["kind"] for trial in trials} == {"drop", "double", "stand-in", "rename", "reshape", "swap"}
    for trial in trials:
        if trial["kind"] in ("drop", "stand-in"):
            assert trial["detected_by"] == "missing"
            assert trial["altered"].split(" ")[0 if trial["kind"] == "drop" else 3] in trial["difference"]


def test_selftest_of_another_checkpoint_says_so(run, bundle: Path, tmp_path: Path) -> None:
    from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint

    other = write_checkpoint(tmp_path / "other", preset("qwen3-moe", num_hidden_layers=1))
    found = run("selftest", bundle, "--checkpoint", other)
    assert found.code == 2
    assert found.stderr.count("rank ") == 1
    assert "the unaltered stream does not give the manifest's contract" in found.stderr
