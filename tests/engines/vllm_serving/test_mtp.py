"""A multi-token-prediction layer of the checkpoint that drafts for the model itself: the drafter has a contract of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_cli.manifest import Manifest
from tests.engines.vllm_serving.serving import ENVIRONMENT, Served, serve
from tests.engines.vllm_serving.test_reload import tensors
from tests.engines.vllm_serving.test_scenarios import draft_digests
from tests.engines.vllm_serving.test_weight_transfer import Sender

pytestmark = pytest.mark.vllm

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}
LAYER = "model.layers.2"
MISSING = f"{LAYER}.mlp.experts.3.up_proj.weight"


def make(folder: Path, seed: int) -> Path:
    """A DeepSeek-V3 of two layers and a drafter, named as the published checkpoint has it: one more layer of the model."""
    import torch
    from safetensors.torch import save_file

    from tests.engines.vllm_serving.checkpoints import save

    config_file = save("deepseek-v3", folder, seed) / "config.json"
    config = {**json.loads(config_file.read_text()), "num_nextn_predict_layers": 1, "topk_method": "noaux_tc"}
    config_file.write_text(json.dumps(config))
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    own = {
        "embed_tokens.weight": (vocabulary, hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden), "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocabulary, hidden),
    }  # fmt: skip
    main = tensors(folder)
    of_a_layer = "model.layers.1."
    block = {
        name.removeprefix(of_a_layer): tensor.shape for name, tensor in main.items() if name.startswith(of_a_layer)
    }
    torch.manual_seed(seed + 100)
    drafter = {
        f"{LAYER}.{name}": (torch.randn(shape) / shape[-1] ** 0.5).to(torch.bfloat16)
        for name, shape in {**own, **block}.items()
    }
    save_file({**main, **drafter}, folder / "model.safetensors", {"format": "pt"})
    return folder


def drafting(folder: Path, manifest: str | None, **arguments: Any) -> Any:
    return serve(folder, manifest, speculative_config=SPECULATIVE, **arguments)


def state(served: Served) -> tuple[Any, Any, Any]:
    return served.tokens(), served.digests, draft_digests(served)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return make(root / "A", 1), make(root / "B", 2)


@pytest.fixture(scope="module")
def offline(folders: tuple[Path, Path]) -> dict[str, str]:
    """Role -> contract of the manifest that was built without the engine, by one process for each."""
    found = {}
    for role in ("main", "draft"):
        bundle = folders[0].parent / role
        command = [sys.executable, "-m", "probe_cli", "build", str(folders[0]), "--engine", "vllm", "--role", role]
        done = subprocess.run(
            [*command, "--arg", f"speculative-config={json.dumps(SPECULATIVE)}", "-o", str(bundle)],
            capture_output=True,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[role] = Manifest.read(bundle, 0).contract_digest
    return found


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[Any, Any, Any]:
    with drafting(folders[1], None) as cold:
        return state(cold)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], offline: dict[str, str], expected: Any) -> Iterator[Served]:
    from vllm.config import WeightTransferConfig

    from tests.engines.vllm_serving.transfer import register

    register()
    transfer = WeightTransferConfig(backend="file-ipc")
    with drafting(folders[0], "record", weight_transfer_config=transfer) as engine:
        engine.llm.init_weight_transfer_engine({"init_info": {}})
        yield engine


def test_both_contracts_are_those_built_offline(served: Served, offline: dict[str, str]) -> None:
    status = served.status
    assert {"main": status["contract_digest"], "draft": status["draft"]["contract_digest"]} == offline
    assert offline["main"] != offline["draft"]


def test_model_and_drafter_are_updated_as_a_cold_load_would(
    served: Served, folders: tuple[Path, Path], expected: Any
) -> None:
    before = state(served)
    assert all(old != new for old, new in zip(before, expected))
    served.reload(weights_path=str(folders[1]))
    assert set(served.status["receipt"]["unknown_sources"]) == {
        name for name in tensors(folders[1]) if name.startswith(f"{LAYER}.")
    }
    assert served.digests == expected[1]
    assert draft_digests(served) != expected[2]
    served.llm.start_draft_weight_update()
    Sender(served, folders[1]).send(10)
    served.llm.finish_weight_update()
    assert state(served) == expected


def test_what_a_drafter_lacks_is_named(served: Served, folders: tuple[Path, Path], expected: Any) -> None:
    served.llm.start_draft_weight_update()
    Sender(served, folders[0]).send(10, without=(MISSING,))
    with pytest.raises(Exception, match=MISSING):
        served.llm.finish_weight_update()
    assert (served.status["state"], served.status["draft"]["state"]) == ("ready", "undefined")
    assert served.digests == expected[1], "embeddings and output layer, which both use, are the main model's"
    served.llm.start_draft_weight_update()
    Sender(served, folders[1]).send(10)
    served.llm.finish_weight_update()
    assert draft_digests(served) == expected[2]
