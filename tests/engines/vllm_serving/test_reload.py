"""`reload_weights` of a running engine, tracked by contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve

pytestmark = pytest.mark.vllm

MODEL = "qwen3-moe"
MISSING = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight")


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def without(folder: Path, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in tensors(folder).items() if name not in names)


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints(MODEL)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], cold: Any) -> Iterator[Served]:
    for folder in folders:
        cold(folder)  # two engines at once would share what vLLM keeps in globals
    with serve(folders[0], "record") as engine:
        yield engine


def test_the_first_load_is_the_same_with_the_plugin(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    assert (served.digests, served.tokens()) == cold(folders[0])
    assert served.status["state"] == "ready" and served.status["generation"] == 0


def test_a_reload_of_the_same_weights_changes_nothing_case_29(
    served: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    served.reload(weights_path=str(folders[0]))
    assert (served.digests, served.tokens()) == cold(folders[0])


@pytest.mark.parametrize("route", ["disk", "iterator", "reversed"])
def test_after_an_update_the_engine_is_what_a_cold_one_would_be(
    served: Served, folders: tuple[Path, Path], cold: Any, route: str
) -> None:
    served.reload(weights_path=str(folders[0]))
    generation = served.status["generation"]
    if route == "disk":
        served.reload(weights_path=str(folders[1]))
    else:
        items = list(tensors(folders[1]).items())
        served.reload(weights_iterator=iter(items if route == "iterator" else items[::-1]))
    assert (served.digests, served.tokens()) == cold(folders[1])
    assert served.status["generation"] == generation + 1
    assert served.status["receipt"]["missing"] == ()


def test_missing_tensors_are_named_and_a_full_update_repairs(
    served: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    from probe_cli.errors import IncompleteUpdate

    with pytest.raises(IncompleteUpdate) as failure:
        served.reload(weights_iterator=without(folders[1], *MISSING))
    assert all(name in str(failure.value) for name in MISSING)
    assert "experts.2.up_proj" not in str(failure.value)
    assert served.status["state"] == "undefined"
    assert [row[0].split(" -> ")[0] for row in served.status["receipt"]["missing"]] == list(MISSING)
    served.reload(weights_iterator=without(folders[1]))
    assert served.status["state"] == "ready"
    assert (served.digests, served.tokens()) == cold(folders[1])


def test_a_duplicate_does_not_stand_in_for_a_missing_tensor_case_1(served: Served, folders: tuple[Path, Path]) -> None:
    from probe_cli.errors import IncompleteUpdate

    sent = tensors(folders[1])
    other = MISSING[0].replace("k_proj", "v_proj")
    stream = [(name, tensor) for name, tensor in sent.items() if name != MISSING[0]]
    stream.insert(stream.index(next(item for item in stream if item[0] == other)), (other, sent[other]))
    with pytest.raises(IncompleteUpdate, match="k_proj"):
        served.reload(weights_iterator=iter(stream))
    assert served.status["receipt"]["extras"] == 1
    served.reload(weights_path=str(folders[0]))


def test_an_empty_update_fails_and_touches_nothing(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    served.reload(weights_path=str(folders[0]))
    with pytest.raises(IncompleteUpdate, match="applications missing"):
        served.reload(weights_iterator=iter([]))
    assert served.status["state"] == "ready"
    assert (served.digests, served.tokens()) == cold(folders[0])


def test_a_stream_that_breaks_is_rolled_back_or_undefined_and_repaired(
    served: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(tensors(folders[1]).items()):
            if index == 40:
                raise ConnectionError("the sender is gone")
            yield item

    with pytest.raises(ConnectionError, match="the sender is gone"):
        served.reload(weights_iterator=broken())
    assert served.status["state"] in ("undefined", "ready")
    served.reload(weights_path=str(folders[1]))
    assert (served.digests, served.tokens()) == cold(folders[1])


def test_loading_past_an_update_is_told_and_a_full_update_repairs(
    served: Served,
    folders: tuple[Path, Path],
    cold: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a worker extension does that calls the model itself."""
    import logging

    served.reload(weights_path=str(folders[0]))
    log = logging.getLogger("probe_cli.vllm")
    monkeypatch.setattr(log, "propagate", True)
    name = "model.norm.weight"
    for _ in range(2):
        served.worker.get_model().load_weights(iter([(name, tensors(folders[1])[name])]))
    said = [record.getMessage() for record in caplog.records if "NOT TRACKED" in record.getMessage()]
    assert len(said) == 1 and "load_weights of Qwen3MoeForCausalLM was called outside a weight update" in said[0]
    assert (served.status["state"], served.status["untracked_loads"]) == ("ready", 2)
    assert served.digests != cold(folders[0])[0]
    served.reload(weights_path=str(folders[0]))
    assert served.status["untracked_loads"] == 0
    assert (served.digests, served.tokens()) == cold(folders[0])
