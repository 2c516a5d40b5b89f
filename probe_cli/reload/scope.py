"""What an update promises to deliver, and which expectations that makes binding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from probe_cli.errors import ReloadError, UsageError
from probe_cli.reload.contract import Contract, Expectation
from probe_cli.reload.text import some

__all__ = ["Scope", "ScopeLike", "resolve"]


class Scope:
    """A named part of the model: `Scope(layers=[...])` or `Scope(sources=[...])`; entries may be patterns with `*`."""

    def __init__(self, *, layers: Iterable[str] = (), sources: Iterable[str] = ()) -> None:
        self.layers = _names(layers, "layers")
        self.sources = _names(sources, "sources")
        if not self.layers and not self.sources:
            raise UsageError("a scope names at least one layer or source", hint='use scope="full" for everything')

    def __str__(self) -> str:
        parts = [f"{kind} {some(names, 4)}" for kind, names in self._parts() if names]
        return ", ".join(parts)

    def _parts(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("layers", self.layers), ("sources", self.sources)]

    def __repr__(self) -> str:
        return f"Scope({', '.join(f'{kind}={list(names)!r}' for kind, names in self._parts() if names)})"


ScopeLike: TypeAlias = Scope | Literal["full"]


def _names(names: Iterable[str], what: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UsageError(f"scope {what}={names!r} is one string, expected a list of names")
    return tuple(dict.fromkeys(names))


def resolve(scope: ScopeLike, contract: Contract, units: Sequence[Sequence[str]]) -> list[Expectation]:
    """The expectations that an update of this scope must fulfil.

    `units` are the groups of layers that are processed together. Raises ReloadError if the scope names something that
    the contract does not know, or cuts through a unit; the part that the scope lacks is named.
    """
    if isinstance(scope, str):
        if scope != "full":
            raise UsageError(f'unknown scope {scope!r}; give "full" or a Scope')
        return list(contract.expectations)
    wanted: dict[int, Expectation] = {}
    for pattern in scope.layers:
        layers = [name for name in contract.by_layer if _matches(name, pattern)]
        if not layers:
            known = any(layer.name == pattern for layer in contract.manifest.layers)
            reason = "nothing is loaded into it" if known else "it is no layer of the manifest"
            raise ReloadError(f"scope: layer {pattern!r}: {reason}")
        wanted.update((e.index, e) for name in layers for e in contract.by_layer[name])
    for pattern in scope.sources:
        sources = [name for name in contract.by_source if _matches(name, pattern)]
        if not sources:
            raise ReloadError(f"scope: source {pattern!r} is none that this rank loads")
        wanted.update((e.index, e) for name in sources for e in contract.by_source[name])
    _refuse_cuts(scope, contract, units, wanted)
    return [wanted[index] for index in sorted(wanted)]


def _refuse_cuts(
    scope: Scope, contract: Contract, units: Sequence[Sequence[str]], wanted: dict[int, Expectation]
) -> None:
    for unit in units:
        expectations = [e for name in unit for e in contract.by_layer.get(name, ())]
        lacking = [e for e in expectations if e.index not in wanted]
        if lacking and len(lacking) < len(expectations):
            missing = some([str(e.key) for e in lacking], 8)
            raise ReloadError(
                f"scope ({scope}) cuts through {some([name or '(model)' for name in unit], 3)}, which is processed as "
                f"one; it lacks {missing}",
                hint="name the whole layer, or add the sources that it lacks",
            )
    promised = set(scope.sources)
    if promised and not scope.layers:
        joined = {e.index: e for e in wanted.values() if len(e.key.sources) > 1}
        for expectation in joined.values():
            absent = [s for s in expectation.key.sources if not any(_matches(s, pattern) for pattern in promised)]
            if absent:
                raise ReloadError(
                    f"scope ({scope}) lacks {some(absent, 8)}, which {expectation.key.full_tensor} is made of too"
                )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or ("*" in pattern and fnmatchcase(name, pattern))
