"""`load_format="dummy"` for engines whose first weights come from a trainer: the contract is probed at the start, or read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import serve
from tests.engines.vllm_serving.test_reload import MISSING, without

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


def header_only(folder: Path, to: Path) -> Path:
    """A checkpoint whose weights are not there."""
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    data = (folder / "model.safetensors").read_bytes()
    (to / "model.safetensors").write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    return to


def test_enable_load_probe_reads_headers_alone(folders: tuple[Path, Path], cold: Any, tmp_path: Path) -> None:
    from probe_cli.errors import IncompleteUpdate

    expected = cold(folders[1])
    where = header_only(folders[0], tmp_path / "headers")
    with serve(where, load_format="dummy", model_loader_extra_config={"enable_load_probe": True}) as served:
        assert served.status["tracked"] is True
        with pytest.raises(IncompleteUpdate) as failure:
            served.reload(weights_iterator=without(folders[1], *MISSING))
        assert all(name in str(failure.value) for name in MISSING)
        served.reload(weights_iterator=without(folders[1]))
        assert (served.digests, served.tokens()) == expected
        probed = served.status["contract_digest"]
    with serve(folders[0], "record") as recorded:
        assert recorded.status["contract_digest"] == probed


def test_the_probe_leaves_the_model_as_the_dummy_loader_does(folders: tuple[Path, Path]) -> None:
    with serve(folders[0], load_format="dummy") as plain:
        expected = plain.digests
        assert plain.status["tracked"] is False
    with serve(folders[0], load_format="dummy", model_loader_extra_config={"enable_load_probe": True}) as served:
        assert served.digests == expected


def test_load_manifest_takes_a_built_one(folders: tuple[Path, Path], cold: Any, tmp_path: Path) -> None:
    expected = cold(folders[1])
    with serve(folders[0], "record") as recorded:
        path = recorded.worker.get_model()._probe_manifest.session.manifest.write(tmp_path / "rank0.json.gz")
    with serve(folders[0], load_format="dummy", model_loader_extra_config={"load_manifest": str(path)}) as served:
        served.reload(weights_iterator=without(folders[1]))
        assert served.digests == expected[0]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"enable_load_probe": "yes"}, "expected true or false"),
        ({"load_manifest": 3}, "expected a path"),
        ({"enable_load_probe": True, "load_manifest": "x"}, "not both"),
        ({"something_else": 1}, "extra config is not supported"),
    ],
)
def test_other_extra_config_is_refused(folders: tuple[Path, Path], extra: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said), serve(folders[0], load_format="dummy", model_loader_extra_config=extra):
        pass
