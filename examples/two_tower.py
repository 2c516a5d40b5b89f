"""A model of your own, for `--engine python:examples/two_tower.py:create`.

Two towers (query and document) that share one embedding; their first layers are fused into one tensor, as a serving
engine would do it. All that a model needs is `load_weights`; loaders on parameters say which part of it a tensor is.

    python examples/two_tower.py checkpoint/
    probe-manifest build checkpoint/ --engine python:examples/two_tower.py:create --arg width=32 --tp 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe_cli import Rank

TOWERS = ("query", "document")
ROWS, SIZE = 100, 16


class TwoTower(nn.Module):
    """One rank: the towers' rows are spread over tensor parallel ranks, the embedding is replicated."""

    def __init__(self, rank: Rank, width: int) -> None:
        super().__init__()
        self.rank = rank
        self.rows = width // rank.tp_size
        self.embedding = nn.Embedding(ROWS, SIZE)
        self.towers = nn.Linear(SIZE, len(TOWERS) * self.rows, bias=False)
        self.towers.weight.weight_loader = self.load_tower

    def load_tower(self, param: nn.Parameter, loaded_weight: torch.Tensor, tower: str) -> None:
        """`tower` is a selector: it says which part of the parameter a tensor is."""
        target = param.data.narrow(0, TOWERS.index(tower) * self.rows, self.rows)
        target.copy_(loaded_weight.narrow(0, self.rank.tp * self.rows, self.rows))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embedding.weight":
                self.embedding.weight.data.copy_(tensor)
            elif name.endswith(".tower.weight"):
                self.towers.weight.weight_loader(self.towers.weight, tensor, name.split(".")[0])


def create(config: Mapping[str, Any] | None, rank: Rank, width: int = 32) -> TwoTower:
    """The factory: gets config.json (or None), the rank, and what `--arg` gave."""
    return TwoTower(rank, width)


def write(directory: str, width: int = 32) -> Path:
    """Write a checkpoint for it."""
    from safetensors.torch import save_file

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{tower}.tower.weight": torch.randn(width, SIZE) for tower in TOWERS}
    tensors["embedding.weight"] = torch.randn(ROWS, SIZE)
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    print(write(sys.argv[1]))
