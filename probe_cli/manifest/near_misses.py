"""What is there instead of a missing source: the same weights joined or apart, or under another name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from probe_cli.checkpoint.types import Described
from probe_cli.dtypes import numel
from probe_cli.manifest.renames import Rename, Rule, find_renames

__all__ = ["Layout", "explain_shape", "explain_unknown", "find_layouts", "find_renamed", "tied_head"]

_MAX_DEPTH = 32


class Layout(NamedTuple):
    """The same number of elements under one name prefix, in other pieces."""

    prefix: str
    wanted: tuple[str, ...]
    there: tuple[str, ...]

    @property
    def what(self) -> str:
        wanted, there = f"the contract wants {len(self.wanted):,}", f"{len(self.there):,}"
        if len(self.wanted) > len(self.there):
            return f"{wanted} sources here, the checkpoint has them joined in {there}"
        return f"{wanted} joined sources here, the checkpoint has {there} apart"

    @property
    def explanation(self) -> str | None:
        leaf = self.prefix.rpartition(".")[2]
        if leaf == "experts":
            return "fused 3-D experts against one tensor per expert"
        if leaf in ("self_attn", "attn", "attention"):
            return "fused attention projections against separate ones"
        return None


def find_layouts(missing: Mapping[str, Described], unknown: Mapping[str, Described]) -> list[Layout]:
    """Prefixes under which missing and unknown sources have equally many elements of each dtype, in another number of
    tensors. Deepest prefixes first; no source is in two layouts."""
    if not missing or not unknown:
        return []
    wanted, there = _by_prefix(missing.values()), _by_prefix(unknown.values())
    layouts: list[Layout] = []
    used: set[str] = set()
    for prefix in sorted(wanted.keys() & there.keys(), key=lambda p: (-p.count("."), p)):
        own, other = wanted[prefix], there[prefix]
        if len(own) == len(other) or used.intersection(own) or used.intersection(other):
            continue
        if _elements(missing, own) == _elements(unknown, other):
            layouts.append(Layout(prefix, tuple(own), tuple(other)))
            used.update(own, other)
    return layouts


def find_renamed(missing: Mapping[str, Described], unknown: Mapping[str, Described]) -> dict[str, tuple[str, str]]:
    """For missing sources that are there under another name: that name, and what happened to the old one."""
    renames = find_renames(
        {name: (source.dtype, source.shape) for name, source in missing.items()},
        {name: (source.dtype, source.shape) for name, source in unknown.items()},
    )
    return {old: (new, text) for rename, text in _explained(renames) for old, new in rename.pairs}


def explain_shape(expected: tuple[int, ...], found: tuple[int, ...]) -> str | None:
    """What a changed shape probably is."""
    if len(expected) >= 2 and found == (*expected[:-2], expected[-1], expected[-2]):
        return "transposed"
    if tuple(n for n in expected if n != 1) == tuple(n for n in found if n != 1):
        return "only dimensions of size 1 differ"
    if numel(expected) == numel(found):
        return "as many elements, arranged otherwise"
    if len(expected) == len(found) and expected[1:] == found[1:] and expected[0]:
        return "padded or cut along the first dimension" if abs(found[0] - expected[0]) < expected[0] / 8 else None
    return None


def tied_head(name: str, names: Iterable[str]) -> str | None:
    """Why an output head may be missing: checkpoints of tied models hold the embedding alone."""
    if not name.endswith("lm_head.weight"):
        return None
    if any(other.endswith("embed_tokens.weight") for other in names):
        return "a checkpoint with tied embeddings has no head of its own: was tie_word_embeddings off at the build?"
    return None


def explain_unknown(name: str) -> str | None:
    """What an unknown source may be."""
    if name.endswith("lm_head.weight"):
        return "the manifest was built for a head that is tied to the embedding"
    return None


def _explained(renames: Iterable[Rename]) -> Iterator[tuple[Rename, str]]:
    return ((rename, _explain(rename.rule)) for rename in renames)


def _explain(rule: Rule) -> str:
    text = f"in the checkpoint {rule}"
    if {rule.old.rpartition("_")[2], rule.new.rpartition("_")[2]} == {"scale", "inv"}:
        text += "; exporters differ in which of the two is the inverse, so compare values before renaming"
    return text


def _by_prefix(sources: Iterable[Described]) -> dict[str, list[str]]:
    prefixes: dict[str, list[str]] = {}
    for source in sources:
        for prefix in _prefixes(source.name):
            prefixes.setdefault(prefix, []).append(source.name)
    return prefixes


def _prefixes(name: str) -> Iterator[str]:
    end = name.rfind(".")
    for _ in range(_MAX_DEPTH):
        if end <= 0:
            return
        yield name[:end]
        end = name.rfind(".", 0, end)


def _elements(sources: Mapping[str, Described], names: Iterable[str]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name in names:
        source = sources[name]
        totals[source.dtype] = totals.get(source.dtype, 0) + numel(source.shape)
    return totals
