"""An emulated H100 gives the answers that docs/engines.md lists, and every one of them without a CUDA call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM's CUDA wheel")

import torch

from probe_cli.engines.base import EngineOptions
from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.errors import EngineError
from probe_cli.topology import Topology
from tests.engines.vllm.harness import ChildFailed, in_child

pytestmark = pytest.mark.vllm_cuda


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    VllmEngine(EngineOptions(target="h100")).warm_up()


def test_torch_sees_the_target() -> None:
    assert torch.cuda.is_available()
    assert torch.accelerator.is_available()
    assert torch.cuda.device_count() == 1024
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    assert properties.total_memory == 80 << 30
    assert torch.cuda.mem_get_info() == (80 << 30, 80 << 30)
    assert not torch.cuda.is_initialized(), "nothing has spoken to a driver"


def test_vllm_sees_the_target() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    assert current_platform.get_device_capability().to_int() == 90
    assert current_platform.has_device_capability(90)
    assert current_platform.has_device_capability((8, 9))
    assert not current_platform.has_device_capability(100)
    assert current_platform.get_device_total_memory() == 80 << 30
    assert current_platform.is_fully_connected([0, 1, 2, 3])


def test_triton_sees_the_target() -> None:
    from triton.runtime import driver

    target = driver.active.get_current_target()
    assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
    assert driver.active.utils.get_device_properties(0)["max_shared_mem"] == 232448


def test_compiled_code_answers_for_a_capability() -> None:
    """Which kernels exist for a device is known to the extensions, not to a table of ours."""
    from vllm import _custom_ops as ops

    assert ops.cutlass_scaled_mm_supports_fp8(90)
    assert ops.cutlass_scaled_mm_supports_block_fp8(90)
    assert not ops.cutlass_scaled_mm_supports_fp8(80)


def test_streams_and_events_do_nothing() -> None:
    stream = torch.cuda.Stream()
    with stream, torch.cuda.stream(stream):
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        stream.wait_event(event)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream().cuda_stream == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_that_is_forked_has_one_thread() -> None:
    """A fork of several threads may hang on what another one held."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(names) == 1, names


def _groups(index: int) -> dict[str, Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import get_ep_group, get_pp_group, get_tp_group

    from probe_cli.engines.vllm.distributed import start_groups

    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.world_size = 8
    with set_current_vllm_config(config):
        start_groups(Topology(tp=4, pp=2).rank(index))
        found = {
            "tp": (get_tp_group().rank_in_group, get_tp_group().ranks),
            "pp": (get_pp_group().rank_in_group, get_pp_group().ranks),
            "ep": get_ep_group().world_size,
        }
        try:
            torch.distributed.all_reduce(torch.ones(2), group=get_tp_group().device_group)
            found["collective"] = "answered"
        except EngineError as error:
            found["collective"] = str(error)
    return found


def test_any_rank_in_one_process_and_no_collective() -> None:
    found = in_child(_groups, 6)
    assert found["tp"] == (2, [4, 5, 6, 7])
    assert found["pp"] == (1, [2, 6])
    assert "the model needs the result of a collective" in found["collective"]


def _no_such_target() -> None:
    VllmEngine(EngineOptions(target="h1000"))


def test_a_target_that_is_none_is_refused_before_anything_is_imported() -> None:
    with pytest.raises(ChildFailed) as caught:
        in_child(_no_such_target)
    assert caught.value.kind == "UsageError"
