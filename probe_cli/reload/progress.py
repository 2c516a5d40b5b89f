"""How far an update is: per unit and per key. Counts only; no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from probe_cli.reload.contract import Contract, Expectation
from probe_cli.reload.receipt import LayerReceipt
from probe_cli.reload.staging import StagedUnit
from probe_cli.reload.state import StateSnapshot
from probe_cli.reload.text import plural
from probe_cli.reload.units import Unit

__all__ = ["Destination", "Progress", "UnitState", "describe_missing"]


class UnitState:
    """One unit during one update."""

    __slots__ = (
        "ceded", "in_place", "in_scope", "last_used", "nbytes", "published", "remaining", "seconds", "snapshots",
        "staged", "touched", "unit", "warned",
    )  # fmt: skip

    def __init__(self, unit: Unit, staged: StagedUnit, remaining: int, *, in_place: bool, ceded: bool = False) -> None:
        self.unit = unit
        self.staged = staged
        self.in_place = in_place
        #: Its layers are another model's: arrivals count, and nothing is written.
        self.ceded = ceded
        #: Applications still to arrive in this update's scope.
        self.remaining = remaining
        self.in_scope = remaining > 0
        self.published = False
        #: Something was applied.
        self.touched = False
        self.warned = False
        self.last_used = 0
        self.nbytes = 0
        self.seconds = 0.0
        #: Plain attributes of the unit's layers before the first application, to put back after a failure.
        self.snapshots: list[StateSnapshot] = []


class Destination:
    """A tensor of the model as a loader may be given it. Kept over updates; `state` is its unit's in the present
    one. `live`: it is given the live tensor, which loading code has kept, though the unit is staged."""

    __slots__ = ("full_name", "key", "live", "state")

    def __init__(self, full_name: str, key: tuple[str, str], state: UnitState, live: bool = False) -> None:
        self.full_name = full_name
        self.key = key
        self.state = state
        self.live = live


class Progress:
    """Counts of one update. `due` are the expectations that its scope makes binding."""

    def __init__(self, contract: Contract, due: Sequence[Expectation]) -> None:
        self.contract = contract
        self.due = due
        self.seen = [0] * len(contract.expectations)
        self.extras: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.out_of_scope = 0

    def _expected(self) -> Counter[str]:
        """Applications that are due, by layer."""
        counts: Counter[str] = Counter()
        for expectation in self.due:
            counts[expectation.key.layer] += expectation.count
        return counts

    def missing(self) -> list[tuple[Expectation, int]]:
        """Keys that have not arrived as often as required, with how often they lack."""
        seen = self.seen
        return [(e, e.count - seen[e.index]) for e in self.due if seen[e.index] < e.count]

    def tally(self, states: Iterable[UnitState]) -> dict[str, Any]:
        """What a receipt says of applications."""
        expected, missing = self._expected(), self.missing()
        total = expected.total()
        return {
            "layers": self._layer_receipts(states, expected, missing),
            "expected": total,
            "observed": total - sum(count for _, count in missing),
            "extras": sum(self.extras.values()),
            "declined": sum(self.declined.values()),
            "out_of_scope": self.out_of_scope,
            "missing": tuple((str(e.key), count) for e, count in missing),
        }

    def _layer_receipts(
        self, states: Iterable[UnitState], expected: Counter[str], missing: Iterable[tuple[Expectation, int]]
    ) -> tuple[LayerReceipt, ...]:
        """Of every layer that something was due for, that something arrived for, or that was processed."""
        lacking = Counter[str]()
        for expectation, count in missing:
            lacking[expectation.layer] += count
        return tuple(
            LayerReceipt(
                name=layer.name,
                expected=expected[layer.name],
                observed=expected[layer.name] - lacking[layer.name],
                extras=self.extras[layer.name],
                declined=self.declined[layer.name],
                published=state.published and not state.ceded,
                nbytes=state.nbytes,
                seconds=round(state.seconds, 6),
            )
            for state in states
            for layer in state.unit.layers
            if layer.name in expected
            or self.extras[layer.name]
            or (state.published and layer.name in state.unit.hooked)
        )


def describe_missing(
    missing: Sequence[tuple[Expectation, int]], unknown: dict[str, tuple[int, ...]], arrived: Iterable[str]
) -> tuple[str, str | None]:
    """(message, hint) for an update that ended early: what is missing, grouped by layer, and what may have come
    instead."""
    by_layer: dict[str, list[str]] = {}
    for expectation, count in missing:
        key = expectation.key
        text = str(key) + (f" (lacks {count} of {expectation.count})" if expectation.count > 1 else "")
        by_layer.setdefault(key.layer, []).append(text)
    total = sum(count for _, count in missing)
    lines = [f"the update is incomplete: {plural(total, 'application')} missing in {plural(len(by_layer), 'layer')}"]
    for layer, keys in list(by_layer.items())[:_MAX_LAYERS]:
        shown = "; ".join(keys[:_MAX_KEYS])
        more = f"; and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
        lines.append(f"  {layer or '(model)'}: {shown}{more}")
    if len(by_layer) > _MAX_LAYERS:
        lines.append(f"  and {len(by_layer) - _MAX_LAYERS} more layers")
    hint = None
    if unknown:
        names = list(unknown)
        lines.append(
            f"  {plural(len(names), 'source')} arrived that this rank's contract does not need: "
            + ", ".join(names[:_MAX_KEYS])
            + (f" and {len(names) - _MAX_KEYS} more" if len(names) > _MAX_KEYS else "")
        )
        hint = "a misspelled name is missing under its right name and not needed under its wrong one"
        absent = {s for e, _ in missing for s in e.key.sources}.difference(arrived)
        if _other_layout(absent, unknown):
            hint = (
                "the update has another layout than the contract was built for (joined or split tensors): build the "
                "manifest for what is sent, from a names file (--wire)"
            )
    return "\n".join(lines), hint


_MAX_LAYERS = 12
_MAX_KEYS = 6


def _other_layout(absent: set[str], unknown: dict[str, tuple[int, ...]]) -> bool:
    """Whether each unknown name seems to stand for several absent ones, or several unknown ones for each absent one:
    they share the module, and one side has a dimension more."""
    if not absent:
        return False

    def parents(names: set[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for name in names:
            stem = name.rsplit(".", 1)[0] if name.endswith((".weight", ".bias")) else name
            parts = stem.split(".")
            cut = next((i for i, part in enumerate(parts) if part in ("experts", "self_attn", "mlp", "attn")), None)
            if cut is not None:
                found[".".join(parts[: cut + 1])] += 1
        return found

    lacking, given = parents(absent), parents(set(unknown))
    common = lacking.keys() & given.keys()
    return bool(common) and all(lacking[name] != given[name] for name in common) and len(common) * 2 >= len(lacking)
