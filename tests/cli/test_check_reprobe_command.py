"""`check --reprobe`: the installed engine builds again, and what it asks for now is compared with the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.main import main
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
