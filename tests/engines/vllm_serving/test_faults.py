"""What vLLM 0.32 does without the plugin, measured: the faults that it is there for.

An update that lacks two tensors returns normally and names neither. A complete reload of the *same* weights changes four tensors
of a small Qwen3-MoE: the experts' kernel has a hook of its own that packs them, and `UnquantizedFusedMoEMethod._setup_kernel`
calls it on the first load alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve
from tests.engines.vllm_serving.test_reload import MISSING, without

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path], cold: Any) -> Iterator[Served]:
    cold(folders[0])
    with serve(folders[0]) as engine:
        yield engine


def test_incomplete_updates_pass_without_a_word(plain: Served, folders: tuple[Path, Path]) -> None:
    plain.reload(weights_iterator=without(folders[1], *MISSING))
    assert plain.status["tracked"] is False


def test_a_complete_reload_of_the_same_weights_changes_the_experts_case_29(
    plain: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    from probe_cli.engines.vllm.serving.digests import differing

    plain.reload(weights_path=str(folders[0]))
    experts = [f"model.layers.{i}.mlp.experts.routed_experts.{w}_weight" for i in (0, 1) for w in ("w13", "w2")]
    assert differing(plain.digests, cold(folders[0])[0]) == experts
    assert plain.tokens() != cold(folders[0])[1]
