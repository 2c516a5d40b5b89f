"""Two layers of a weight and a bias, with loaders and loading code that do not simply copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.reload.models import Model, default_loader, parameter

SHAPES = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
#: What a model's loading code looks like: (model, stream) -> names.
Load = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], Any]


class Layer(nn.Module):
    def __init__(self, loader: Callable[..., object] | None) -> None:
        super().__init__()
        self.weight = parameter(4, 4, loader=loader)
        self.bias = parameter(4, loader=loader)


def model_with(loader: Callable[..., object] | None = default_loader, load: Load | None = None) -> Callable[[], Model]:
    class Odd(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(loader), Layer(loader)

    if load is not None:
        Odd.load_weights = load  # type: ignore[method-assign, assignment]
    return Odd


def data(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data = loaded_weight


def data_computed(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data = loaded_weight * 2


def set_(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.set_(loaded_weight)


def copy_then_data(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data = param.data.clone()
