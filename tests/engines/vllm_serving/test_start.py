"""What a start with the plugin refuses, and what it warns of."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import serve

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


@pytest.fixture(scope="module")
def manifest(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with serve(folders[0], "record") as served:
        return served.worker.get_model()._probe_manifest.session.manifest.write(tmp_path_factory.mktemp("m") / "r.json")


def changed(manifest: Path, to: Path, change: Any) -> Path:
    import msgspec

    from probe_cli.manifest import Manifest
    from probe_cli.manifest.schema import ManifestDocument

    values = json.loads(manifest.read_text())
    change(values)
    values.pop("digest")
    values.pop("contract_digest")
    document = msgspec.convert(values, ManifestDocument)
    derived = ("format", "version", "digest", "contract_digest")
    fields = {name: getattr(document, name) for name in document.__struct_fields__ if name not in derived}
    return Manifest.build(**fields).write(to)


MISMATCHES = {
    "version": (lambda v: v["engine"].update(version="0.33.0"), "engine version: the manifest was built with 0.33.0"),
    "target": (lambda v: v["engine"].update(target="h200"), "engine target: the manifest was built with h200"),
    "model": (
        lambda v: v["model"].update({"class": "LlamaForCausalLM"}),
        "model: the manifest is for LlamaForCausalLM",
    ),
    "layer": (lambda v: v["layers"].pop(3), "in the model, not in the manifest"),
    "shape": (lambda v: v["layers"][0]["tensors"][0].update(shape=[8, 8]), "the manifest says BF16[8, 8]"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_another_models_manifest_is_refused(
    folders: tuple[Path, Path], manifest: Path, tmp_path: Path, kind: str
) -> None:
    from probe_cli.errors import ReloadError

    change, said = MISMATCHES[kind]
    path = changed(manifest, tmp_path / "other.json", change)
    with pytest.raises(ReloadError) as failure, serve(folders[0], str(path)):
        pass
    assert said in str(failure.value)


def test_a_mismatch_can_be_a_warning_and_serving_goes_on_untracked(
    folders: tuple[Path, Path], manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(manifest, tmp_path / "other.json", MISMATCHES["version"][0])
    logging.getLogger("probe_cli").propagate = True
    with serve(folders[0], str(path), env={"PROBE_MANIFEST_ON_MISMATCH": "warn"}) as served:
        assert served.status["tracked"] is False
        assert "0.33.0" in served.status["reason"]
        served.reload(weights_path=str(folders[1]))
    loud = [record for record in caplog.records if "NOT TRACKED" in record.getMessage()]
    assert len(loud) == 1


def test_a_manifest_that_is_not_there_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from probe_cli.errors import ReloadError

    with pytest.raises(ReloadError, match="no such file"), serve(folders[0], str(tmp_path / "none")):
        pass


def test_the_manifest_built_offline_is_the_contract_recorded_in_the_engine(
    folders: tuple[Path, Path], cold: Any, tmp_path: Path
) -> None:
    import subprocess
    import sys

    expected = cold(folders[1])
    out = tmp_path / "bundle"
    command = [sys.executable, "-m", "probe_cli", "build", str(folders[0]), "--engine", "vllm", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with serve(folders[0], str(out), env={"PROBE_MANIFEST_RECEIPTS": str(tmp_path / "receipts")}) as served:
        offline = served.status["contract_digest"]
        served.reload(weights_path=str(folders[1]))
        assert (served.digests, served.tokens()) == expected
    receipt = json.loads((tmp_path / "receipts" / "receipt-rank0-update1.json").read_text())
    assert receipt["ok"] is True and receipt["contract_digest"] == offline
    with serve(folders[0], "record") as recorded:
        assert recorded.status["contract_digest"] == offline
