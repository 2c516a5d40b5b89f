"""The overview of a manifest or bundle, as text and as JSON: one row per rank, and what no rank uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.patterns import fold_text
from probe_cli.manifest.schema import BundleIndex, EngineIdentity, ManifestDocument, Summary
from probe_cli.report.numbers import bytes_text, plural
from probe_cli.report.plain import printable
from probe_cli.report.table import table
from probe_cli.topology import Rank, Topology

__all__ = ["engine_text", "overview_json", "overview_text", "place", "unused_lines"]

_COLUMNS = (
    ("layers", "layers"),
    ("tensors", "tensors"),
    ("applications", "applications"),
    ("declined", "declined"),
    ("direct", "direct_writes"),
    ("computed", "computed"),
    ("gaps", "gaps"),
    ("overlaps", "overlaps"),
    ("unwritten", "unfed"),
    ("sources", "sources_used"),
)
_REASONS = {
    "declined": "offered to loaders, all of which declined",
    "skipped": "passed over by load_weights",
    "unread": "never reached by load_weights",
}


def _ranks(origin: Bundle | Manifest) -> list[tuple[Rank, Summary]]:
    if isinstance(origin, Bundle):
        return [(entry.rank, entry.summary) for entry in origin.index.ranks]
    return [(origin.rank, origin.summary)]


def _head(origin: Bundle | Manifest) -> BundleIndex | ManifestDocument:
    return origin.index if isinstance(origin, Bundle) else origin.document


def place(rank: Rank) -> str:
    """A rank's coordinates in the groups that have more than one member: `tp 1, ep 1`."""
    return ", ".join(
        f"{name} {getattr(rank, name)}" for name in ("tp", "pp", "ep", "dp") if getattr(rank.topology, name) > 1
    )


def engine_text(engine: EngineIdentity) -> str:
    """`vllm 0.33.0, target h200 (emulated), torch 2.13.0`."""
    emulated = " (emulated)" if engine.emulated else ""
    return f"{engine.name} {engine.version}, target {engine.target}{emulated}, torch {engine.torch}"


def overview_text(origin: Bundle | Manifest, *, width: int, limit: int | None = 20) -> list[str]:
    """What `show` prints without filters, and `build` at its end. At most `limit` patterns of names per list."""
    head = _head(origin)
    model = head.model.architecture or head.model.class_name
    checkpoint = head.checkpoint
    where = f"{checkpoint.repo_id}@{(checkpoint.revision or '')[:12]}, " if checkpoint.repo_id else ""
    lines = [
        printable(f"{model} for {engine_text(head.engine)}"),
        *([_arguments(head.engine.arguments)] if head.engine.arguments else []),
        f"topology {_topology(head.topology)}; checkpoint {where}{plural(checkpoint.sources, 'source')}, "
        f"{bytes_text(checkpoint.nbytes)}" + (" (wire file)" if checkpoint.kind == "wire" else ""),
        "",
        *_rank_table(_ranks(origin), width),
    ]
    if isinstance(origin, Bundle):
        lines += _missing_ranks(origin)
        lines += unused_lines(origin.index.unused, origin.index.checkpoint.sources, limit)
        lines += _unfed_lines(origin.index.unfed, len(origin.index.ranks), limit)
    return lines


def _arguments(arguments: Mapping[str, Any]) -> str:
    return printable("arguments " + ", ".join(f"{name}={value}" for name, value in arguments.items()))


def _topology(topology: Topology) -> str:
    return f"{topology} ({plural(topology.world_size, 'rank')})"


def _rank_table(ranks: Sequence[tuple[Rank, Summary]], width: int) -> list[str]:
    headers = ["rank", *(name for name, _ in _COLUMNS), "reads"]
    align = "r" * len(headers)
    rows = [
        [str(rank.index), *(f"{getattr(summary, field):,}" for _, field in _COLUMNS), bytes_text(summary.bytes_read)]
        for rank, summary in ranks
    ]
    if any(place(rank) for rank, _ in ranks):
        headers.insert(1, "place")
        align = "rl" + "r" * (len(headers) - 2)
        for row, (rank, _) in zip(rows, ranks):
            row.insert(1, place(rank))
    return table(headers, rows, right=align, width=width)


def _missing_ranks(bundle: Bundle) -> list[str]:
    missing = sorted(set(range(bundle.index.topology.world_size)).difference(bundle.ranks))
    return ["", f"not in this bundle: {', '.join(fold_text(f'rank {rank}' for rank in missing))}"] if missing else []


def unused_lines(unused: Mapping[str, Sequence[str]], total: int, limit: int | None) -> list[str]:
    """Sources that no rank uses, by reason and pattern."""
    count = sum(map(len, unused.values()))
    if not count:
        return ["", f"unused sources: none of {total:,}"]
    lines = ["", f"unused sources: {count:,} of {total:,}"]
    for reason, names in unused.items():
        lines.append(f"  {reason} ({_REASONS.get(reason, reason)}):")
        lines += _folded(names, limit)
    return lines


def _unfed_lines(unfed: Mapping[str, Sequence[int]], ranks: int, limit: int | None) -> list[str]:
    if not unfed:
        return ["unfed parameters: none"]
    lines = [f"unfed parameters: {len(unfed):,} (no source writes them)"]
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, where in unfed.items():
        by_ranks.setdefault(tuple(where), []).append(name)
    for where, names in by_ranks.items():
        if len(where) < ranks:
            lines.append(f"  on {', '.join(fold_text(f'rank {rank}' for rank in where))}:")
        lines += _folded(names, limit)
    return lines


def _folded(names: Iterable[str], limit: int | None) -> list[str]:
    return [f"    {printable(line)}" for line in fold_text(names, limit)]


def overview_json(origin: Bundle | Manifest) -> dict[str, Any]:
    """The overview for programs: the fields are documented in docs/commands.md."""
    head = _head(origin)
    ranks = [
        {
            "rank": rank.index,
            "tp": rank.tp,
            "pp": rank.pp,
            "ep": rank.ep,
            "dp": rank.dp,
            **msgspec.to_builtins(summary),
        }
        for rank, summary in _ranks(origin)
    ]
    document: dict[str, Any] = {
        "version": head.version,
        "kind": "bundle" if isinstance(origin, Bundle) else "rank",
        "digest": head.digest,
        "engine": msgspec.structs.asdict(head.engine),
        "topology": msgspec.to_builtins(head.topology),
        "model": msgspec.to_builtins(head.model),
        "checkpoint": msgspec.to_builtins(head.checkpoint),
        "sources": head.checkpoint.sources,
    }
    if isinstance(origin, Bundle):
        document["sources_unused"] = sum(map(len, origin.index.unused.values()))
        document["tensors_unfed"] = len(origin.index.unfed)
        document["unused"] = msgspec.to_builtins(origin.index.unused)
        document["unfed"] = msgspec.to_builtins(origin.index.unfed)
    document["ranks"] = ranks
    return document
