"""Models for `--engine python:tests/cli/models.py:NAME`: one that loads, and ones that misbehave on rank 1."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe_cli import Rank


class Plain(nn.Module):
    """Copies every source into a parameter of the same name; `skip` of them are left alone."""

    def __init__(self, skip: int = 0) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(250, 64))
        self.norm = nn.Parameter(torch.empty(64))
        self.skip = skip

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        names = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        with torch.no_grad():
            for name, tensor in weights:
                if name in names:
                    names[name].copy_(tensor)


def plain(config: Any, rank: Rank, **arguments: Any) -> nn.Module:
    return Plain()


def fails(config: Any, rank: Rank) -> nn.Module:
    if rank.index == 1:
        raise RuntimeError("no such layer: 17")
    return slow(config, rank, seconds=60)


def killed(config: Any, rank: Rank) -> nn.Module:
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(config, rank, seconds=60)


def noisy(config: Any, rank: Rank) -> nn.Module:
    print("to stdout, where results go")
    os.write(1, b"straight to the descriptor\n")
    if rank.index == 1:
        raise RuntimeError("after saying something")
    return Plain()


def slow(config: Any, rank: Rank, seconds: float = 60, started: str = "") -> nn.Module:
    if started:
        Path(started, str(os.getpid())).touch()
    time.sleep(seconds)
    return Plain()
