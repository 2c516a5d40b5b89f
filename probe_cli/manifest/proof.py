"""The proof over all ranks (rule 11): every source is used by a rank, or unused with a reason; and what no source
feeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from probe_cli.errors import ManifestError
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.schema import SourceEntry

__all__ = ["REASONS", "unfed_parameters", "unused_sources"]

#: Why no rank uses a source, the strongest reason first: a loader that was offered it and declined says more than
#: `load_weights` passing over it, and that more than never having got there.
REASONS = ("declined", "skipped", "unread")


def unused_sources(
    sources: Iterable[SourceEntry], manifests: Sequence[Manifest], outcomes: Sequence[Mapping[str, str]]
) -> dict[str, tuple[str, ...]]:
    """Sources that no rank uses, by reason, in the order of loading. `outcomes` gives, for each manifest, what became
    of the sources that its rank does not use. Raises ManifestError on a source that no rank accounts for."""
    used = {source.name for manifest in manifests for source in manifest.sources}
    found: dict[str, list[str]] = {reason: [] for reason in REASONS}
    lost: list[str] = []
    for source in sources:
        if source.name in used:
            continue
        stated = {outcome[source.name] for outcome in outcomes if source.name in outcome}
        unknown = stated.difference(REASONS)
        if unknown:
            raise ManifestError(f"source {source.name!r}: {min(unknown)!r} is no reason to leave a source unused")
        if len(stated) == 0:
            lost.append(source.name)
        else:
            found[min(stated, key=REASONS.index)].append(source.name)
    if lost:
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise ManifestError(f"source {lost[0]!r}{more}: used by no rank, and no rank says why")
    return {reason: tuple(names) for reason, names in found.items() if names}


def unfed_parameters(manifests: Sequence[Manifest]) -> dict[str, tuple[int, ...]]:
    """Parameters (`layer.tensor`) that no application writes, with the ranks where that is so."""
    unfed: dict[str, list[int]] = {}
    for manifest in manifests:
        for name in _unfed(manifest):
            unfed.setdefault(name, []).append(manifest.rank.index)
    return {name: tuple(ranks) for name, ranks in unfed.items()}


def _unfed(manifest: Manifest) -> Iterable[str]:
    written: set[str] = set()
    groups: dict[str, str] = {}
    parameters: list[str] = []
    for layer in manifest.layers:
        prefix = f"{layer.name}." if layer.name else ""
        for application in layer.applications:
            if not application.writes:
                written.add(prefix + application.tensor)
            written.update(write.tensor or prefix + application.tensor for write in application.writes)
        for tensor in layer.tensors:
            if tensor.alias is not None:
                groups[prefix + tensor.name] = tensor.alias
            if tensor.kind == "parameter" and 0 not in tensor.shape:
                parameters.append(prefix + tensor.name)
    fed_groups = {groups[name] for name in written if name in groups}
    return [name for name in parameters if name not in written and groups.get(name) not in fed_groups]
