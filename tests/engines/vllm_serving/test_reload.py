"""`reload_weights` of a running engine, tracked by contract.

Measured on vLLM 0.32.0 without the plugin: an update that lacks two tensors returns normally and names neither, and a complete
reload of the same weights changes four tensors of a small Qwen3-MoE, since the experts' kernel has a hook of its own that runs
on the first load alone (`UnquantizedFusedMoEMethod._setup_kernel`).
"""

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
def served(folders: tuple[Path, Path]) -> Iterator[Served]:
    with serve(folders[0], "record") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Iterator[Served]:
    with serve(folders[0]) as engine:
        yield engine


def test_the_fault_incomplete_updates_pass_without_the_plugin(plain: Served, folders: tuple[Path, Path]) -> None:
    plain.reload(weights_iterator=without(folders[1], *MISSING))
    assert plain.status["tracked"] is False


def test_the_fault_a_reload_of_the_same_weights_changes_the_experts(plain: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.engines.vllm.serving.digests import differing

    plain.reload(weights_path=str(folders[0]))
    changed = differing(plain.digests, cold(folders[0])[0])
    assert changed == [f"model.layers.{i}.mlp.experts.routed_experts.{w}_weight" for i in (0, 1) for w in ("w13", "w2")]
    assert plain.tokens() != cold(folders[0])[1]


def test_the_first_load_is_the_same_with_the_plugin(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    assert (served.digests, served.tokens()) == cold(folders[0])
    assert served.status["state"] == "ready" and served.status["generation"] == 0


def test_a_reload_of_the_same_weights_changes_nothing_case_29(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
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


def test_missing_tensors_are_named_and_a_full_update_repairs(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
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

    twice = tensors(folders[1])
    doubled = [(n, t) for n, t in twice.items() if n != MISSING[0]] + [(MISSING[0].replace("k_proj", "v_proj"),) * 1]
    stream = [*doubled[:-1], (doubled[-1][0], twice[doubled[-1][0]])]
    stream.insert(0, stream[-1])
    with pytest.raises(IncompleteUpdate, match="k_proj"):
        served.reload(weights_iterator=iter(stream[:-1]))
    served.reload(weights_path=str(folders[0]))


def test_an_empty_update_fails_and_touches_nothing(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    served.reload(weights_path=str(folders[0]))
    with pytest.raises(IncompleteUpdate, match="applications missing"):
        served.reload(weights_iterator=iter([]))
    assert served.status["state"] == "ready"
    assert (served.digests, served.tokens()) == cold(folders[0])


def test_a_stream_that_breaks_is_rolled_back_or_undefined_and_repaired(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
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
