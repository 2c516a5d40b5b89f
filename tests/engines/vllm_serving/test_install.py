"""The plugin installs itself in a vLLM that is imported: on the CUDA wheel too, on a host without a GPU, in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tests.engines.vllm.harness import in_child

pytestmark = [pytest.mark.vllm, pytest.mark.vllm_cuda]

#: What the plugin's own modules import only when it comes to it: module -> names.
LATER = {
    "vllm.model_executor.model_loader.weight_utils": ["default_weight_loader"],
    "vllm.v1.request": ["RequestStatus"],
    "vllm.v1.engine": ["EngineCoreOutput", "EngineCoreOutputs", "FinishReason"],
}


def install() -> dict[str, Any]:
    import importlib

    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        from probe_cli.engines.base import EngineOptions
        from probe_cli.engines.vllm.engine import VllmEngine

        VllmEngine(EngineOptions(target="h100")).warm_up()
    from probe_cli.engines.vllm.serving import patches, probing, processing, rank  # noqa: F401
    from probe_cli.engines.vllm.serving.points import POINTS, resolve

    patches.install()
    patches.install_dummy_loader()
    replaced = {name: hasattr(resolve(point)[2], "__wrapped__") for name, point in POINTS.items()}
    for module, names in LATER.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names), module
    from vllm.distributed.weight_transfer import ipc_engine  # noqa: F401
    from vllm.model_executor.model_loader.reload import inplace
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.worker.worker_base import WorkerBase

    output = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)
    EngineCoreOutputs(outputs=[output], finished_requests={"r"})
    return {
        "replaced": replaced,
        "imported before": hasattr(inplace.initialize_layerwise_reload, "__wrapped__"),
        "methods": sorted(name for name in vars(WorkerBase) if name.startswith("probe_manifest")),
    }


def test_every_point_is_replaced_and_every_method_is_there() -> None:
    from probe_cli.engines.vllm.serving.points import POINTS

    found = in_child(install)
    assert found["replaced"] == {name: name != "worker" for name in POINTS}  # methods are added to that one
    assert found["imported before"]
    assert found["methods"] == ["probe_manifest_digests", "probe_manifest_receipt", "probe_manifest_undefined"]
