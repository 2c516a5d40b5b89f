"""`start_weight_update`, `update_weights` in chunks, `finish_weight_update`, with vLLM's engines for IPC and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve

pytestmark = pytest.mark.vllm

MISSING = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight")


class Sender:
    """Sends a checkpoint in chunks of a size; cut anywhere (case 25)."""

    def __init__(self, served: Served, folder: Path) -> None:
        from safetensors import safe_open

        self.served = served
        self.path = str(folder / "model.safetensors")
        with safe_open(self.path, "pt") as file:
            self.names = list(file.keys())

    def chunk(self, names: list[str]) -> None:
        self.served.llm.update_weights({"update_info": {"path": self.path, "names": names}})

    def send(self, size: int, without: tuple[str, ...] = (), order: int = 1) -> None:
        names = [name for name in self.names if name not in without][::order]
        for start in range(0, len(names), size):
            self.chunk(names[start : start + size])


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


@pytest.fixture(scope="module", params=["file-ipc", "file-nccl"])
def served(folders: tuple[Path, Path], cold: Any, request: pytest.FixtureRequest) -> Iterator[Served]:
    for folder in folders:
        cold(folder)
    from vllm.config import WeightTransferConfig

    from tests.engines.vllm_serving.transfer import register

    register()
    with serve(folders[0], "record", weight_transfer_config=WeightTransferConfig(backend=request.param)) as engine:
        engine.llm.init_weight_transfer_engine({"init_info": {}})
        yield engine


@pytest.mark.parametrize(("size", "order"), [(7, 1), (1000, 1), (10, -1)])
def test_an_update_in_chunks_ends_as_a_cold_load_would(
    served: Served, folders: tuple[Path, Path], cold: Any, size: int, order: int
) -> None:
    for folder in (folders[1], folders[0], folders[1]):
        served.llm.start_weight_update()
        Sender(served, folder).send(size, order=order)
        served.llm.finish_weight_update()
    assert (served.digests, served.tokens()) == cold(folders[1])


def test_finish_names_what_is_missing_and_a_retry_repairs(
    served: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    served.llm.start_weight_update()
    Sender(served, folders[1]).send(10, MISSING)
    with pytest.raises(Exception, match="2 applications missing") as failure:
        served.llm.finish_weight_update("v2")
    assert all(name in str(failure.value) for name in MISSING)
    assert served.llm.get_weight_version() != "v2"
    served.llm.start_weight_update()
    Sender(served, folders[1]).send(10)
    served.llm.finish_weight_update("v3")
    assert served.llm.get_weight_version() == "v3"
    assert (served.digests, served.tokens()) == cold(folders[1])


def test_a_chunk_that_fails_ends_the_update_and_the_next_one_works(
    served: Served, folders: tuple[Path, Path], cold: Any
) -> None:
    sender = Sender(served, folders[0])
    served.llm.start_weight_update()
    sender.chunk(sender.names[:3])
    with pytest.raises(Exception, match="File does not contain tensor"):
        sender.chunk(["no.such.tensor"])
    served.llm.start_weight_update()
    sender.send(50)
    served.llm.finish_weight_update()
    assert (served.digests, served.tokens()) == cold(folders[0])


def test_between_chunks_the_old_weights_serve_until_their_layer_is_complete(
    served: Served, folders: tuple[Path, Path]
) -> None:
    before = served.digests
    sender = Sender(served, folders[1])
    served.llm.start_weight_update()
    sender.chunk([name for name in sender.names if "q_proj" in name])
    assert served.digests == before
    with pytest.raises(Exception, match="applications missing"):
        served.llm.finish_weight_update()
    assert served.digests == before
    assert served.status["state"] == "ready"


def test_a_finish_without_a_start_is_refused_by_vllm_as_before(served: Served) -> None:
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        served.llm.finish_weight_update()
