"""The devices that a manifest can be built for, and what each of them answers when an engine asks. No torch.

Figures are the vendor's published ones; those that only shape kernels' launch parameters (memory, SM count) do not reach
a contract, but an engine reads them while it builds a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from probe_cli.errors import UsageError

__all__ = ["TARGETS", "Target", "target_named"]

GIB = 1 << 30


@dataclass(frozen=True)
class Target:
    """A device type. `capability` is (major, minor); memory in bytes; `shared_memory` is the opt-in maximum per block."""

    name: str
    capability: tuple[int, int]
    device_name: str
    memory: int
    multiprocessors: int
    shared_memory: int
    l2_cache: int


_A100 = Target("a100", (8, 0), "NVIDIA A100-SXM4-80GB", 80 * GIB, 108, 166912, 40 << 20)
_L40S = Target("l40s", (8, 9), "NVIDIA L40S", 48 * GIB, 142, 101376, 96 << 20)
_H100 = Target("h100", (9, 0), "NVIDIA H100 80GB HBM3", 80 * GIB, 132, 232448, 50 << 20)
_H200 = Target("h200", (9, 0), "NVIDIA H200", 141 * GIB, 132, 232448, 50 << 20)
_B200 = Target("b200", (10, 0), "NVIDIA B200", 180 * GIB, 148, 232448, 126 << 20)

#: By the name that `--target` takes. `smXY` stands for the usual device of that capability.
TARGETS: dict[str, Target] = {
    "a100": _A100,
    "l40s": _L40S,
    "h100": _H100,
    "h200": _H200,
    "b200": _B200,
    "sm80": _A100,
    "sm89": _L40S,
    "sm90": _H100,
    "sm100": _B200,
}


def target_named(name: str) -> Target:
    """Raises UsageError for a name that is not in the table."""
    target = TARGETS.get(name.lower())
    if target is None:
        raise UsageError(f"no target {name!r}; there are {', '.join(TARGETS)}, cpu and auto")
    return target
