"""`build`: what it writes, what it says, and what is a finding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from probe_cli import Bundle, Manifest
from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint

MODELS = Path(__file__).with_name("models.py")


def test_bundle_and_summary(run, checkpoint: Path, tmp_path: Path) -> None:
    found = run("build", checkpoint, "--engine", "embedded", "--tp", "2", "--ep", "-o", tmp_path / "out")
    assert found.code == 0, found.stderr
    assert "Qwen3MoeForCausalLM for embedded" in found.stdout
    assert "unused sources: none of 69\nunfed parameters: none\n" in found.stdout
    assert "[2/2] rank" in found.stderr
    assert f"wrote {tmp_path / 'out'}" in found.stderr
    bundle = Bundle.read(tmp_path / "out")
    assert bundle.ranks == (0, 1)
    assert [manifest.rank.ep for manifest in bundle.manifests()] == [0, 1]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_json_has_the_fields_of_show(run, checkpoint: Path, tmp_path: Path) -> None:
    built = run("build", checkpoint, "--tp", "2", "--ep", "-o", tmp_path / "out", "--format", "json").json
    shown = run("show", tmp_path / "out", "--format", "json").json
    for entry in built["ranks"]:
        assert entry.pop("peak_rss") > 10_000_000
        assert set(entry.pop("seconds")) >= {"materialize", "replay"}
    assert built.pop("output") == str(tmp_path / "out")
    assert built.pop("seconds") > 0
    assert built == shown


def test_the_same_bytes_whatever_the_jobs(run, checkpoint: Path, tmp_path: Path) -> None:
    """Rule 12: the same inputs give the same bytes."""
    for jobs in ("1", "2"):
        assert run("build", checkpoint, "--tp", "2", "--ep", "-j", jobs, "-o", tmp_path / jobs).code == 0
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert files == ["bundle.json.gz", "rank-00000.json.gz", "rank-00001.json.gz"]
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in files)


def test_a_bundle_is_replaced_and_nothing_else_is(run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("build", checkpoint, "-o", out).code == 0
    assert run("build", checkpoint, "--tp", "2", "-o", out).code == 0
    assert Bundle.read(out).ranks == (0, 1)
    (out / "notes.txt").write_text("mine")
    refused = run("build", checkpoint, "-o", out)
    assert refused.code == 2
    assert "holds 'notes.txt', not a bundle, so it is not replaced" in refused.stderr
    assert Bundle.read(out).ranks == (0, 1)


def test_one_rank_as_a_file(run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "rank.json"
    assert run("build", checkpoint, "--tp", "4", "--ranks", "3", "-o", out).code == 0
    assert Manifest.read(out).rank.index == 3
    refused = run("build", checkpoint, "--tp", "4", "-o", out)
    assert (refused.code, refused.stdout) == (2, "")
    assert "a file holds one rank, but 4 are built" in refused.stderr


@pytest.mark.parametrize("name", ["bundle.json.gz", "bundle.json", "rank-00000.json.gz", "rank-00007.json.gz"])
def test_a_file_is_not_written_into_a_bundle(run, checkpoint: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    assert run("build", checkpoint, "--tp", "2", "-o", out).code == 0
    refused = run("build", checkpoint, "-o", out / name)
    assert (refused.code, refused.stdout) == (2, "")
    assert f"{name}: a part of the bundle in" in refused.stderr
    assert [manifest.rank.index for manifest in Bundle.read(out).manifests()] == [0, 1]


def test_a_load_that_uses_nothing_is_trouble(run, tmp_path: Path) -> None:
    """An empty contract would be fulfilled by whatever is sent."""
    names = tmp_path / "names.json"
    names.write_text('[["transformer.wte.weight", "F32", [250, 64]], ["transformer.ln_f.weight", "F32", [64]]]')
    found = run("build", "--wire", names, "--engine", f"python:{MODELS}:plain", "-o", tmp_path / "out")
    assert (found.code, found.stdout) == (2, "")
    assert "nothing is loaded: load_weights uses none of the 2 sources on any rank that was built" in found.stderr
    assert "hint: is it this model's checkpoint? its first source is transformer.wte.weight" in found.stderr
    assert not (tmp_path / "out").exists()


def test_some_ranks(run, checkpoint: Path, tmp_path: Path) -> None:
    found = run("build", checkpoint, "--tp", "4", "--ranks", "1-2", "-o", tmp_path / "out")
    assert found.code == 0
    assert Bundle.read(tmp_path / "out").ranks == (1, 2)
    assert "not in this bundle: rank {0,3} (2)" in found.stdout


def test_without_output_nothing_is_written(run, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("build", checkpoint)
    assert (found.code, list(tmp_path.iterdir())) == (0, [])
    assert "nothing written" in found.stderr


def test_unused_and_unfed_are_folded_and_findings_under_strict(run, checkpoint: Path, tmp_path: Path) -> None:
    engine = ("--engine", f"python:{MODELS}:plain")
    loose = run("build", checkpoint, *engine, "-o", tmp_path / "out")
    assert loose.code == 0
    assert "unused sources: 67 of 69\n  skipped (passed over by load_weights):" in loose.stdout
    assert "    model.layers.{0,1}.mlp.experts.{0-7}.{down_proj,gate_proj,up_proj}.weight (48)\n" in loose.stdout
    assert "running your own code" in loose.stderr
    shutil.rmtree(tmp_path / "out")
    strict = run("build", checkpoint, *engine, "-o", tmp_path / "out", "--strict")
    assert (strict.code, (tmp_path / "out").exists()) == (1, False)
    assert "error: --strict: 67 findings" in strict.stderr


def test_a_wire_file_in_place_of_weights(run, checkpoint: Path, tmp_path: Path) -> None:
    wire = [
        {"name": name, "dtype": source["dtype"], "shape": source["shape"]}
        for name, source in _sources(run, checkpoint, tmp_path)
    ]
    (tmp_path / "names.json").write_text(json.dumps(wire))
    found = run("build", checkpoint, "--wire", tmp_path / "names.json", "--tp", "2", "--format", "json")
    assert found.code == 0, found.stderr
    assert found.json["checkpoint"]["kind"] == "wire"
    assert [entry["applications"] for entry in found.json["ranks"]] == [69, 69]
    alone = run("build", "--wire", tmp_path / "names.json")
    assert alone.code == 2
    assert "name an engine with --engine" in alone.stderr


def _sources(run, checkpoint: Path, tmp_path: Path):
    run("build", checkpoint, "-o", tmp_path / "for-sources")
    index = Bundle.read(tmp_path / "for-sources").index
    return [(source.name, {"dtype": source.dtype, "shape": source.shape}) for source in index.sources]


def test_order_changes_the_order_and_not_the_contract(run, checkpoint: Path, tmp_path: Path) -> None:
    found = {}
    for order in ("engine", "name", "layer"):
        assert run("build", checkpoint, "--order", order, "-o", tmp_path / f"{order}.json").code == 0
        found[order] = Manifest.read(tmp_path / f"{order}.json")
    names = [source.name for source in found["name"].sources]
    assert names == sorted(names)
    assert names != [source.name for source in found["engine"].sources]
    assert len({manifest.contract_digest for manifest in found.values()}) == 1


def test_verify(run, checkpoint: Path) -> None:
    assert run("build", checkpoint, "--tp", "2", "--verify").code == 0


def test_configuration_file_and_flags_over_it(run, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    config = tmp_path / "build.toml"
    config.write_text(f'checkpoint = "{checkpoint}"\nengine = "embedded"\n[topology]\ntp = 2\nep = true\n')
    assert run("build", "--config", config, "--format", "json").json["topology"] == {"tp": 2, "pp": 1, "ep": 2, "dp": 1}
    flagged = run("build", "--config", config, "--tp", "4", "--format", "json").json
    assert flagged["topology"] == {"tp": 4, "pp": 1, "ep": 4, "dp": 1}
    monkeypatch.setenv("PROBE_MANIFEST_BUILD_TP", "1")
    assert run("build", "--config", config, "--format", "json").json["topology"]["tp"] == 1
    config.write_text("tensor = 2\n")
    wrong = run("build", "--config", config)
    assert wrong.code == 2
    assert f"{config}: " in wrong.stderr
    assert "tensor" in wrong.stderr


def test_engine_arguments_from_the_file_and_the_flags(run, checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "build.toml"
    config.write_text(f'engine = "python:{MODELS}:plain"\n[arguments]\na = 1\nb = 2\n')
    found = run("build", checkpoint, "--config", config, "--arg", "b=3", "--format", "json").json
    assert found["engine"]["arguments"] == {"factory": "models.py:plain", "a": 1, "b": 3}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no checkpoint: name a folder"),
        (("CHECKPOINT", "--engine", "vlm"), 2, "no engine 'vlm'; there are embedded, python, vllm"),
        (("CHECKPOINT", "--tp", "8", "--ep", "3"), 2, "ep=3 does not divide tp x dp = 8"),
        (("CHECKPOINT", "--tp", "0"), 2, "--tp"),
        (("CHECKPOINT", "--ranks", "1"), 2, "there is no rank 1 among 1 ranks"),
        (("CHECKPOINT", "--target", "h200"), 2, "--target h200 means nothing"),
        (("CHECKPOINT", "-o", "/proc/nowhere/out"), 2, "/proc"),
        (("/nowhere",), 2, "no such file or folder"),
        (("CHECKPOINT", "--tp", "7"), 2, "7"),
    ],
)
def test_bad_usage_is_one_line(run, checkpoint: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    found = run("build", *(checkpoint if argument == "CHECKPOINT" else argument for argument in arguments))
    assert (found.code, found.stdout) == (code, "")
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in found.stderr


def test_a_model_that_no_engine_knows(run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", preset("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    found = run("build", folder)
    assert found.code == 2
    assert "'gpt_neox'" in found.stderr
    assert "probe-manifest[vllm]" in found.stderr


def test_a_wrong_shape_names_rank_and_source(run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", preset("llama"), shards=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file)
    found = run("build", folder, "--tp", "2", "-o", tmp_path / "out")
    assert (found.code, (tmp_path / "out").exists()) == (3, False)
    assert "error: rank " in found.stderr
    assert name in found.stderr
