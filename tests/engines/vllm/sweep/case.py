"""What a case of the sweep is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from probe_cli.topology import Topology

__all__ = ["Case", "Outcome"]


@dataclass(frozen=True)
class Case:
    """`make` writes the checkpoint into a folder (in the case's own process, vLLM imported)."""

    name: str
    make: Callable[[Path], None]
    topology: Topology = field(default_factory=lambda: Topology(tp=2))
    rank: int = 1
    target: str = "h100"
    role: str = "main"
    #: Spread experts over all ranks, if the model has any.
    spread: bool = False
    #: Engine arguments; `{folder}` in a text stands for the checkpoint's folder.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: What was done to the header beyond what transformers saves; it then proves the replay, not the checkpoint.
    bent: str = ""
    #: The folder has code of its own, which vLLM is to run.
    own_code: bool = False
    #: To be tried if vLLM does not know the names of this one.
    otherwise: Case | None = None


class Outcome(msgspec.Struct):
    """`status`: "passed", "failed", or "not made" (no checkpoint could be made: no class, no usable defaults)."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    model: str = ""
    topology: str = ""
    sources: int = 0
    applications: int = 0
    declined: int = 0
    direct: int = 0
    #: Reason -> folded names of sources that no loader of this rank is offered.
    unused: dict[str, list[str]] = {}
    #: Reason -> folded names of parameters that nothing writes.
    unfed: dict[str, list[str]] = {}
    where: str = ""
    bent: str = ""
