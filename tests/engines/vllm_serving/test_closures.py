"""vLLM 0.32 on CPU keeps the packed weights of a linear layer nowhere but in the closure of a function that post-processing makes
(`dispatch_cpu_unquantized_gemm`, `model_executor/layers/utils.py`). A reload that keeps the old function serves the old weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from probe_cli.reload import ReloadSession
from tests.reload.models import Model, cold, parameter


class Handle:
    """Opaque: packed weights behind a number."""

    __slots__ = ("values",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.values = tuple(weight.flatten().tolist())


class Linear(nn.Module):
    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.weight = parameter(2, 3)
        self.opaque = opaque

    def process_weights_after_loading(self) -> None:
        packed: Any = Handle(self.weight) if self.opaque else self.weight.detach().t().contiguous()
        self.gemm = lambda: packed
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Net(Model):
    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.linear = Linear(opaque)


def _reloaded(opaque: bool) -> tuple[Net, torch.Tensor, Any]:
    first = torch.arange(6.0).view(2, 3)
    model, manifest, captured = cold(lambda: Net(opaque), {"linear.weight": first})
    before = model.linear.gemm()
    session = ReloadSession(model, manifest, cold=captured, poison=True)
    second = first + 10
    with session.update() as update:
        update.load_weights([("linear.weight", second)])
    return model, second, before


def test_a_tensor_in_a_closure_gets_the_new_values_and_stays_where_it_is() -> None:
    model, second, before = _reloaded(opaque=False)
    assert model.linear.gemm() is before
    assert torch.equal(model.linear.gemm(), second.t())


def test_a_function_over_an_opaque_handle_is_replaced() -> None:
    model, second, before = _reloaded(opaque=True)
    assert model.linear.gemm() is not before
    assert model.linear.gemm().values == tuple(second.flatten().tolist())
