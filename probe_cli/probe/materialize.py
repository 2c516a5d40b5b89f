"""Build a model without its memory: weights go to the meta device, small control tensors stay real.

Everything on meta would break constructors that look at their own tables (an expert map that calls `nonzero`, sizes
that are read back), so only what can be large is sent there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MetaMaterializer"]

#: Uninitialized or random: nobody can depend on their values.
_VALUELESS = frozenset({torch.empty, torch.empty_strided, torch.empty_permuted, torch.rand, torch.randn})
#: Their values mean something: real while small.
_FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye, torch.tensor})
_FACTORIES = _VALUELESS | _FILLED | frozenset({torch.randint, torch.randperm, torch.as_tensor})
#: Made beside another tensor: where that one is, whatever device is asked for.
_LIKE = frozenset(
    {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
    | {torch.randint_like, torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full}
    | {torch.Tensor.new_tensor, torch.Tensor.new_empty_strided}
)
_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory})


class MetaMaterializer(TorchFunctionMode):
    """Function mode for building a model. `control_limit`: elements up to which a filled or integer tensor is real.

    Explicit devices are not obeyed: a constructor that asks for `device="cuda"` gets meta or host memory, and moving a
    tensor to a device leaves it where it is.
    """

    def __init__(self, control_limit: int = 1 << 16) -> None:
        super().__init__()
        self.control_limit = control_limit

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FACTORIES:
            keywords = dict(kwargs or {})
            if "out" not in keywords or keywords["out"] is None:
                keywords["device"] = "meta" if self._goes_to_meta(func, args, keywords) else "cpu"
                keywords.pop("pin_memory", None)
            return func(*args, **keywords)
        if func in _LIKE and kwargs and kwargs.get("device") is not None:
            keywords = dict(kwargs)
            if torch.device(keywords["device"]).type != "meta":
                del keywords["device"]
            keywords.pop("pin_memory", None)
            return func(*args, **keywords)
        if getattr(func, "__module__", "") == "torch.nn.init" and _on_meta(args, kwargs):
            # Random values of no memory; on meta some of them would import torch's whole compiler (seconds).
            return args[0] if args else (kwargs or {})["tensor"]
        if func in _MOVES:
            return self._stay(func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _goes_to_meta(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if str(kwargs.get("device", "")) == "meta":
            return True
        if func not in _VALUELESS and func not in (torch.zeros, torch.ones, torch.full):
            return False
        if func in _VALUELESS:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point or dtype.is_complex:
                return True
        return _numel(args, kwargs) > self.control_limit

    def _stay(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if func is not torch.Tensor.to:
            return tensor
        kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        rest: list[Any] = []
        for arg in args[1:]:
            if isinstance(arg, torch.dtype):
                rest.append(arg)
            elif isinstance(arg, torch.Tensor):
                rest.append(arg.dtype)
        if not rest and not kwargs:
            return tensor
        if not rest and kwargs.get("dtype") is None and not kwargs.get("copy") and "memory_format" not in kwargs:
            return tensor
        return func(tensor, *rest, **kwargs)


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list, torch.Size)) else None)
    if size is None:
        size = [arg for arg in args if isinstance(arg, int)]
    count = 1
    for length in size:
        count *= int(length)
    return count


def _on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    tensor = args[0] if args else (kwargs or {}).get("tensor")
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
