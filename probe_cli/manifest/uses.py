"""Which ranks and layers use which sources, read from the ranks' files without their regions."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from probe_cli.errors import ManifestError
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.schema import Layer

__all__ = ["Use", "find_uses"]


class _Application(msgspec.Struct, gc=False):
    sources: tuple[str, ...]


class _Layer(msgspec.Struct, gc=False):
    name: str
    applications: tuple[_Application, ...] = ()


class _Document(msgspec.Struct):
    layers: tuple[_Layer, ...]


_decoder = msgspec.json.Decoder(_Document)


class Use(msgspec.Struct):
    """The ranks (ascending) and the layers (in model order) whose contracts name a source."""

    ranks: list[int]
    layers: dict[str, None]


def find_uses(origin: Bundle | Manifest, names: Iterable[str]) -> dict[str, Use]:
    """Who uses these sources. Ranks whose files cannot be read are left out; `check` reports those on their own."""
    wanted = frozenset(names)
    uses: dict[str, Use] = {}
    if not wanted:
        return uses
    if isinstance(origin, Manifest):
        _collect(origin.rank.index, origin.layers, wanted, uses)
        return uses
    for rank in origin.ranks:
        try:
            text = origin.rank_text(rank)
        except ManifestError:
            continue
        _collect(rank, _decoder.decode(text).layers, wanted, uses)
    return uses


def _collect(rank: int, layers: Iterable[_Layer | Layer], wanted: frozenset[str], uses: dict[str, Use]) -> None:
    for layer in layers:
        for application in layer.applications:
            for source in application.sources:
                if source not in wanted:
                    continue
                use = uses.get(source)
                if use is None:
                    use = uses[source] = Use([], {})
                if not use.ranks or use.ranks[-1] != rank:
                    use.ranks.append(rank)
                use.layers[layer.name] = None
