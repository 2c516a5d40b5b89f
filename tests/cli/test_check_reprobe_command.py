"""`check --reprobe`: the installed engine builds again, and what it asks for now is compared with the manifest."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import msgspec
import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.main import main
from probe_cli.errors import EngineError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.schema import Layer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint/ and bundle/, really built for two ranks, and other/: as an engine before an upgrade had built it."""
    from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint

    folder = tmp_path_factory.mktemp("place")
    write_checkpoint(folder / "checkpoint", preset("qwen3-moe"))
    assert main(["build", str(folder / "checkpoint"), "--tp", "2", "--ep", "-o", str(folder / "bundle")]) == 0
    bundle = Bundle.read(folder / "bundle")
    built = []
    for manifest in bundle.manifests():
        names = ("engine", "topology", "rank", "model", "checkpoint", "sources", "summary")
        parts = {name: getattr(manifest.document, name) for name in names}
        built.append(Manifest.build(**parts, layers=[_twice(layer) for layer in manifest.layers]))
    Bundle.build(Checkpoint.open(folder / "checkpoint"), built, [{}, {}]).write(folder / "other")
    return folder


def _twice(layer: Layer) -> Layer:
    if layer.name != "model.norm":
        return layer
    (application,) = layer.applications
    return msgspec.structs.replace(layer, applications=(msgspec.structs.replace(application, count=2),))


@pytest.mark.parametrize(("name", "code"), [("bundle", 0), ("other", 1)])
def test_the_contract_is_built_again(
    name: str, code: int, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    capsys.readouterr()
    assert main(["check", name, "checkpoint", "--reprobe", "--format", "json"]) == code
    out, err = capsys.readouterr()
    assert "building 2 ranks again with embedded" in err
    found = [(f["code"], f["subject"], f["ranks"]) for f in json.loads(out)["manifests"][0]["findings"]]
    assert found == ([("PM401", "model.norm.weight", [0, 1])] if code else [])


def test_findings_are_told_where_the_engine_fails_too(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is cut off one projection: the engine refuses to build, and the finding says why."""
    monkeypatch.chdir(place)
    sources = Checkpoint.open("checkpoint").sources
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = [[s.name, s.dtype, [31, 64] if s.name == name else s.shape] for s in sources]
    (place / "cut").mkdir()
    (place / "cut" / "config.json").write_bytes((place / "checkpoint" / "config.json").read_bytes())
    offset, entries = 0, {}
    for source_name, dtype, shape in rows:
        size = 4 * math.prod(shape)
        entries[source_name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries).encode()
    (place / "cut" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    capsys.readouterr()
    assert main(["check", "bundle", "cut", "--reprobe"]) == 3
    out, err = capsys.readouterr()
    assert f"error PM102 changed-shape: {name}: has shape [31, 64]" in out
    assert re.search(r"error: rank [01] ", err) and "31 rows, expected 32" in err  # whichever rank fails first
    monkeypatch.setattr("probe_cli.probe.runner.build_bundle", _fail)
    assert main(["check", "bundle", "checkpoint", "--reprobe"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "error: no such luck")


def _fail(*arguments: object, **options: object) -> None:
    raise EngineError("no such luck")


def test_code_that_a_manifest_names_is_run_only_when_the_user_names_it_too(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is untrusted input. Its arguments are taken from it all the same."""
    monkeypatch.chdir(place)
    models = Path(__file__).with_name("models.py")
    engine = f"python:{models}:plain"
    assert main(["build", "checkpoint", "--engine", engine, "--arg", "skip=0", "-o", "own"]) == 0
    (place / "models.py").write_text("open('it-ran', 'w')")
    capsys.readouterr()
    assert main(["check", "own", "checkpoint", "--reprobe"]) == 2
    err = capsys.readouterr().err
    assert "built by code of its author's own, models.py:plain, which is not run on the word of a file" in err
    assert "hint: if it is yours: --engine python:models.py:plain" in err
    assert not (place / "it-ran").exists()
    assert main(["check", "own", "checkpoint", "--reprobe", "--engine", engine]) == 0
