"""Online quantization: bf16 checkpoints that vLLM quantizes while it loads them. On CPUs without AMX, vLLM 0.32 runs that for dense
models with `fp8_per_channel` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import serve
from tests.engines.vllm_serving.test_reload import without

pytestmark = pytest.mark.vllm

QUANTIZED: dict[str, Any] = {"quantization": "fp8_per_channel"}
TRACK = {"PROBE_MANIFEST_ONLINE_QUANTIZATION": "track"}
MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3")


def test_it_is_refused_with_the_reason_and_the_way_out(folders: tuple[Path, Path]) -> None:
    from probe_cli.errors import ReloadError

    said = "layer model.layers.0.self_attn.qkv_proj quantizes while it loads"
    with pytest.raises(ReloadError, match=said) as failure, serve(folders[0], "record", **QUANTIZED):
        pass
    assert "PROBE_MANIFEST_ONLINE_QUANTIZATION=track" in str(failure.value)


def test_a_tracked_update_ends_as_vllms_own_cold_load_would(folders: tuple[Path, Path]) -> None:
    from probe_cli.errors import IncompleteUpdate

    expected = []
    for folder in folders:
        with serve(folder, **QUANTIZED) as plain:
            expected.append((plain.tokens(), plain.digests))
        del plain  # its groups go with it
    assert "float8_e4m3fn" in expected[0][1]["model.layers.0.mlp.gate_up_proj.weight"]
    with serve(folders[0], "record", env=TRACK, **QUANTIZED) as served:
        assert served.status["tracked"] is True
        assert (served.tokens(), served.digests) == expected[0]
        served.reload(weights_path=str(folders[0]))
        assert (served.tokens(), served.digests) == expected[0]
        with pytest.raises(IncompleteUpdate, match=MISSING):
            served.reload(weights_iterator=without(folders[1], MISSING))
        served.reload(weights_path=str(folders[1]))
        assert (served.tokens(), served.digests) == expected[1]
        assert served.status["receipt"]["extras"] == 0
