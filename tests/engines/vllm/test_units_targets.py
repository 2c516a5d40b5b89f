"""The table of targets: the names people use, the capability that decides layouts."""

from __future__ import annotations

import pytest

from probe_cli.engines.vllm.targets import TARGETS, target_named
from probe_cli.errors import UsageError


@pytest.mark.parametrize(
    ("name", "capability", "gib"),
    [
        ("h100", (9, 0), 80),
        ("h200", (9, 0), 141),
        ("b200", (10, 0), 180),
        ("a100", (8, 0), 80),
        ("l40s", (8, 9), 48),
        ("sm80", (8, 0), 80),
        ("sm89", (8, 9), 48),
        ("sm90", (9, 0), 80),
        ("sm100", (10, 0), 180),
        ("H100", (9, 0), 80),
    ],
)
def test_capability_and_memory(name: str, capability: tuple[int, int], gib: int) -> None:
    target = target_named(name)
    assert target.capability == capability
    assert target.memory == gib << 30


def test_an_unknown_target_names_all_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        target_named("h1000")
    assert str(caught.value).startswith("no target 'h1000'; there are ")
    assert all(name in str(caught.value) for name in (*TARGETS, "cpu", "auto"))


def test_sm_names_say_their_capability() -> None:
    for name, target in TARGETS.items():
        if name.startswith("sm"):
            assert name == f"sm{target.capability[0]}{target.capability[1]}"
