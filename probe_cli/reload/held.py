"""Loader calls that wait for their turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from probe_cli.reload.progress import Destination

__all__ = ["HeldCall", "copied"]


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


def copied(value: Any, destinations: Mapping[int, Destination], own: object) -> Any:
    if isinstance(value, torch.Tensor) and value is not own and id(value) not in destinations:
        return value.clone()
    return value
