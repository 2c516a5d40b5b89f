"""Draft models, layers that LoRA wraps, compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve
from tests.engines.vllm_serving.test_reload import without
from tests.engines.vllm_serving.test_weight_transfer import Sender

pytestmark = pytest.mark.vllm

MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def drafts(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("llama-tied")


def draft_digests(served: Served) -> dict[str, str]:
    from probe_cli.engines.vllm.serving.digests import live_digests

    return live_digests(served.worker.get_draft_model())


def speculating(target: Path, draft: Path, **arguments: Any) -> Any:
    config = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
    return serve(target, "record", speculative_config=config, **arguments)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path], drafts: tuple[Path, Path]) -> tuple[Any, Any, Any]:
    """Of an engine that was started with B and draft B: tokens, digests, digests of the draft."""
    with speculating(folders[1], drafts[1]) as cold:
        return cold.tokens(), cold.digests, draft_digests(cold)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], drafts: tuple[Path, Path], expected: Any) -> Iterator[Served]:
    from vllm.config import WeightTransferConfig

    from tests.engines.vllm_serving.transfer import register

    register()
    transfer = WeightTransferConfig(backend="file-ipc")
    with speculating(folders[0], drafts[0], weight_transfer_config=transfer) as engine:
        engine.llm.init_weight_transfer_engine({"init_info": {}})
        yield engine


def test_a_draft_model_is_updated_by_a_contract_of_its_own(
    served: Served, folders: tuple[Path, Path], drafts: tuple[Path, Path], expected: Any
) -> None:
    main, draft = served.status, served.status["draft"]
    assert (draft["role"], draft["tracked"]) == ("draft", True) and draft["contract_digest"] != main["contract_digest"]
    served.llm.start_draft_weight_update()
    Sender(served, drafts[1]).send(10)
    served.llm.finish_weight_update()
    assert draft_digests(served) == expected[2]
    assert (served.status["generation"], served.status["draft"]["generation"]) == (0, 1)
    served.reload(weights_path=str(folders[1]))
    assert (served.tokens(), served.digests, draft_digests(served)) == expected


def test_a_draft_update_that_fails_leaves_the_main_model_serving(
    served: Served, drafts: tuple[Path, Path], expected: Any
) -> None:
    served.llm.start_draft_weight_update()
    Sender(served, drafts[0]).send(10, without=(MISSING,))
    with pytest.raises(Exception, match=MISSING):
        served.llm.finish_weight_update()
    assert (served.status["state"], served.status["draft"]["state"]) == ("ready", "undefined")
    assert served.tokens()[0] == expected[0][0]  # a draft proposes, the main model decides
    served.llm.start_draft_weight_update()
    Sender(served, drafts[1]).send(10)
    served.llm.finish_weight_update()
    assert served.status["draft"]["state"] == "ready"
    assert draft_digests(served) == expected[2]


# Engines of their own, which end that of the tests above.


def updated_as_cold(folders: tuple[Path, Path], **arguments: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    with serve(folders[1], **arguments) as plain:
        expected = plain.tokens(), plain.digests
    del plain  # its groups go with it
    with serve(folders[0], "record", **arguments) as served:
        assert served.status["tracked"] is True
        assert served.tokens() != expected[0]
        with pytest.raises(IncompleteUpdate, match=MISSING):
            served.reload(weights_iterator=without(folders[1], MISSING))
        served.reload(weights_path=str(folders[1]))
        assert (served.tokens(), served.digests) == expected
        harm = [f for f in served.status["receipt"]["findings"] if f["kind"] not in ("settled", "refreshed")]
        assert harm == []


def test_layers_that_lora_wraps(folders: tuple[Path, Path]) -> None:
    updated_as_cold(folders, enable_lora=True, max_lora_rank=8)


def test_a_compiled_model_sees_the_new_weights(folders: tuple[Path, Path]) -> None:
    updated_as_cold(folders, enforce_eager=False)
