"""Models for the cases from the field: each as small as the fault allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from tests.reload.models import (
    Model,
    parameter,
)

Route = dict[str, tuple[str, dict[str, Any]]]

SHAPES_1 = {"block.left": (4,), "block.right": (4,)}


class Pair(Model):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.left = parameter(4)
        self.block.right = parameter(4)


SHAPES_2 = {"mixer.A": (4,), "mixer.dt_bias": (4,), "mixer.D": (4,)}


def composed_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.copy_(-torch.exp(param.data))


class Mamba(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.A = parameter(4, loader=composed_loader)
        self.mixer.dt_bias = parameter(4)
        self.mixer.D = parameter(4)


class Packed(Model):
    """`weight_shape` is loaded once for each of q, k and v, with one key."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Module()
        self.qkv.weight_shape = parameter(2)
        self.qkv.weight = parameter(4)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "shape":
                for _ in range(3):
                    self.qkv.weight_shape.weight_loader(self.qkv.weight_shape, tensor)
            else:
                self.qkv.weight.weight_loader(self.qkv.weight, tensor)
        return set()


class Padded(Model):
    """Rows 0 to 2 are loaded, row 3 is left as it is made; the loader derives a buffer; post-processing sums all
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PaddedLinear()


class PaddedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), 7.0), requires_grad=False)
        self.weight.weight_loader = self.load
        self.register_buffer("top", torch.zeros(2))
        self.register_buffer("total", torch.zeros(2), persistent=False)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data[:3].copy_(loaded_weight)
        self.top.copy_(loaded_weight[0])

    def process_weights_after_loading(self) -> None:
        self.total.copy_(self.weight.sum(0))


class Buffered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.linear = nn.Module()
        self.linear.weight = parameter(4)
        self.linear.register_buffer("mask", torch.ones(3), persistent=False)


class Viewed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Module()
        self.child.weight = parameter(4, 2)
        self.register_buffer("flat", self.child.weight.data.view(-1), persistent=False)


class LateBias(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Module()
        self.linear.weight = parameter(4)

    def add_bias(self) -> LateBias:
        self.linear.bias = parameter(4)
        return self


class Shared(Model):
    route: ClassVar[Route] = {"A": ("norm.weight", {}), "B": ("norm.weight", {})}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = parameter(4)


QKV = {f"attn.{name}_proj.weight": (2, 3) for name in "qkv"}


class Fused(Model):
    route: ClassVar[Route] = {f"attn.{name}_proj.weight": ("attn.qkv", {"loaded_shard_id": name}) for name in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.attn = FusedLinear()


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(6, 3, loader=self.load)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None) -> None:
        assert loaded_shard_id is not None
        param.data.narrow(0, 2 * "qkv".index(loaded_shard_id), 2).copy_(loaded_weight)


class Deep(Model):
    layers = 60

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(FusedLinear() for _ in range(self.layers))
        self.route = {
            f"layer.{i}.{name}": (f"layer.{i}.qkv", {"loaded_shard_id": name})
            for i in range(self.layers)
            for name in "qkv"
        }


DEEP = {f"layer.{i}.{name}": (2, 3) for i in range(60) for name in "qkv"}


class Sinks(Model):
    """`load_weights` writes one tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.sinks = parameter(4, loader=None)
        self.attn.weight = parameter(4)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            param = params[name]
            if name.endswith("sinks"):
                param.data[:2].copy_(tensor[:2])
                param.data[2:].copy_(tensor[2:])
            else:
                param.weight_loader(param, tensor)
        return set(params)


EXPERTS = {f"moe.experts.{i}.{name}": (2, 3) for i in range(8) for name in ("w1", "w2")}


class Moe(Model):
    """Expert parallel rank 3 of 4 owns experts 6 and 7."""

    route: ClassVar[Route] = {
        name: ("moe.w", {"shard_id": name[-2:], "expert_id": int(name.split(".")[2])}) for name in EXPERTS
    }

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoeLayer()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        self.answers: list[object] = []
        for name, tensor in weights:
            target, selectors = self.route.get(name, (name, {}))
            param = params[target]
            self.answers.append(param.weight_loader(param, tensor, return_success=True, **selectors))
            loaded.add(target)
        return loaded


class MoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 2, 3, loader=self.load)
        self.register_buffer("expert_map", torch.tensor([-1] * 6 + [0, 1]), persistent=False)
        self.calls = 0

    def load(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        self.calls += 1
        local = int(self.expert_map[expert_id])
        if local < 0:
            return False
        param.data[2 * local + ("w1", "w2").index(shard_id)].copy_(loaded_weight)
        return True


class Fragile(Model):
    layers = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(FragileLayer() for _ in range(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = x * layer.weight + layer.bias
        return x


class FragileLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4)
        self.bias = parameter(4, loader=self.load)
        self.broken = False

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if self.broken:
            raise ValueError("disk on fire")
        param.data.copy_(loaded_weight)


FRAGILE = {f"layer.{i}.{name}": (4,) for i in range(6) for name in ("weight", "bias")}


class Swapped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = SwappedLinear()


class SwappedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 2)

    def process_weights_after_loading(self) -> None:
        self.w.data.copy_(torch.cat([self.w.data[2:], self.w.data[:2]]))


class Scaled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = ScaledLinear()


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(1)
        self.weight = parameter(4)
        self.scale_float = 0.0

    def process_weights_after_loading(self) -> None:
        self.scale.data.mul_(0.5)
        self.scale_float = float(self.scale)


class Stale(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.linear.process_weights_after_loading = lambda: None


class Workspace(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = WorkspaceLinear()


class WorkspaceLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4)

    def process_weights_after_loading(self) -> None:
        self.workspace = self.weight.data * 2


class Growing(Workspace):
    def __init__(self) -> None:
        super().__init__()
        linear = self.linear
        runs = [0]

        def process() -> None:
            runs[0] += 1
            linear.workspace = torch.ones(runs[0])

        linear.process_weights_after_loading = process


class Joined(Model):
    """q_a and kv_a are concatenated before they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.fused = parameter(5, 2)
        self.attn.norm = parameter(2)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params, cache = dict(self.named_parameters()), {}
        for name, tensor in weights:
            if name == "attn.norm":
                params[name].weight_loader(params[name], tensor)
                continue
            cache[name] = tensor
            if len(cache) == 2:
                fused = torch.cat([cache["attn.q_a"], cache["attn.kv_a"]])
                params["attn.fused"].weight_loader(params["attn.fused"], fused)
        return set()


JOINED = {"attn.q_a": (2, 2), "attn.norm": (2,), "attn.kv_a": (3, 2)}


class Either(Model):
    """Takes experts one by one, or all in one 3-D tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.w = parameter(8, 2, loader=self.load)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, expert_id: int | None = None) -> None:
        (param.data if expert_id is None else param.data[expert_id]).copy_(loaded_weight)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        param = self.mlp.experts.w
        for name, tensor in weights:
            parts = name.split(".")
            param.weight_loader(param, tensor, **({"expert_id": int(parts[2])} if parts[2].isdigit() else {}))
        return set()


class Valued(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "linear.scale" and tensor.item() == 0.0:
                raise ValueError("zero scale")
            param = self.get_parameter(name)
            param.weight_loader(param, tensor)
        return set()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Module()
        self.linear.scale = parameter(1)
        self.linear.weight = parameter(4)


class Kernel:
    def __init__(self) -> None:
        self.packed = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.w.data.copy_(layer.w.data.flip(0))
        self.packed = True


class Method:
    """The kernel packs the weights when it is made, and is made once."""

    def __init__(self, registry: dict[int, Kernel] | None = None) -> None:
        self.kernel: Kernel | None = None
        if registry is not None:
            self._made = registry.__contains__

            def make(key: int, kernel: Kernel) -> None:
                registry[key] = kernel

            self._make = make

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.kernel is None:
            self.kernel = Kernel()
            self.kernel.process_weights_after_loading(layer)


_KERNELS: dict[str, Kernel] = {}


class HiddenMethod:
    """As `Method`, but the kernel is where nobody can see it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.key not in _KERNELS:
            _KERNELS[self.key] = Kernel()
            _KERNELS[self.key].process_weights_after_loading(layer)


class Kerneled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.w = parameter(4, 2)
        self.moe.quant_method = Method()


class Hidden(Kerneled):
    def __init__(self) -> None:
        super().__init__()
        self.moe.quant_method = HiddenMethod(f"{id(self)}")
