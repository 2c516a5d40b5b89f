"""What is refused at the start, with its reason. No vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from probe_cli.engines.vllm.serving.refusals import refusals


def config(**values: Any) -> Any:
    return SimpleNamespace(**{"parallel_config": SimpleNamespace(enable_eplb=False), "lora_config": None, **values})


def lines(
    model: nn.Module | None = None, *, online: str | None = None, quantization: str | None = None, **values: Any
) -> list[str]:
    return list(
        refusals(model or nn.Linear(1, 1), config(**values), SimpleNamespace(quantization=quantization), online)
    )


class Experts(nn.Module):
    """As `FusedMoEWithLoRA` is marked in vLLM 0.32."""

    lora_base_layer_prefix = "base_layer"


def test_nothing_is_refused_without_a_reason() -> None:
    assert lines() == []
    assert lines(nn.Sequential(nn.Linear(1, 1)), lora_config=object()) == []
    offload = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0))
    assert lines(offload_config=offload) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quantization": "torchao"}, "torchao quantizes inside load_weights"),
        ({"online": "layers.0.mlp"}, "layer layers.0.mlp quantizes while it loads"),
        ({"parallel_config": SimpleNamespace(enable_eplb=True)}, "EPLB moves experts between updates"),
        ({"model": nn.Sequential(Experts()), "lora_config": object()}, "LoRA wraps the experts"),
        (
            {"offload_config": SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=4), prefetch=None)},
            "offloaded to the host",
        ),
        (
            {"offload_config": SimpleNamespace(uva=None, prefetch=SimpleNamespace(offload_group_size=2))},
            "offloaded to the host",
        ),
    ],
)
def test_each_refusal_says_why(values: dict[str, Any], said: str) -> None:
    (line,) = lines(**values)
    assert said in line
