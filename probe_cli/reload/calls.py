"""Loader calls that are kept: to recognize them in the next update, or until it is their turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from probe_cli.reload.progress import Destination

__all__ = ["HeldCall", "are_plain", "copied"]


class HeldCall:
    """A call that waits for its turn."""

    __slots__ = ("args", "destination", "kwargs", "loader")

    def __init__(
        self, destination: Destination, loader: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.destination = destination
        self.loader = loader
        self.args = args
        self.kwargs = kwargs


def are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all arguments but the first two are plain values: such a call can be remembered. True equals 1 in a
    dictionary, so only the flag may be one."""
    return all(type(value) in _PLAIN for value in args[2:]) and all(
        type(value) in _PLAIN or (name == "return_success" and type(value) is bool) for name, value in kwargs.items()
    )


_PLAIN = frozenset({str, int, type(None)})


def copied(value: Any, destinations: Mapping[int, Destination], own: object) -> Any:
    if isinstance(value, torch.Tensor) and value is not own and id(value) not in destinations:
        return value.clone()
    return value
