"""`diff`: what changed between two bundles, two manifests of a rank, or two checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import UsageError
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_documents import compare_index, compare_rank, compare_sources, source_renames
from probe_cli.manifest.diff_rules import CLASSES, KINDS, ChangeClass, Section
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.identity import checkpoint_identity, source_entry

__all__ = ["DiffReport", "DiffSide", "diff"]


class DiffSide(msgspec.Struct, frozen=True):
    """What was compared."""

    path: str
    kind: str
    digest: str
    ranks: tuple[int, ...] = ()


class DiffReport(msgspec.Struct, frozen=True):
    """Every change, those of the index first, then rank by rank."""

    old: DiffSide
    new: DiffSide
    changes: tuple[Change, ...]
    #: Changes that there are beside these, which were not asked for.
    left_out: int = 0

    def told(self) -> Iterator[Change]:
        """The changes without those that only repeat for one rank what is said of all."""
        return (change for change in self.changes if not change.echo)

    def counts(self) -> dict[ChangeClass, int]:
        """How many changes there are of each class."""
        kinds = Counter(change.kind for change in self.told())
        return {name: sum(n for kind, n in kinds.items() if KINDS[kind].change_class == name) for name in CLASSES}

    @property
    def worst(self) -> ChangeClass | None:
        """The gravest class that occurs; None if nothing changed."""
        found = {KINDS[kind].change_class for kind in {change.kind for change in self.changes}}
        return next((c for c in CLASSES if c in found), None)

    def only(self, sections: Iterable[Section]) -> DiffReport:
        """The changes of some sections."""
        wanted = frozenset(sections)
        return self._keep(tuple(c for c in self.changes if c.section in wanted))

    def of_class(self, change_class: ChangeClass) -> DiffReport:
        """The changes of one class."""
        return self._keep(tuple(c for c in self.changes if c.change_class == change_class))

    def _keep(self, changes: tuple[Change, ...]) -> DiffReport:
        kept = msgspec.structs.replace(self, changes=changes)
        lost = sum(1 for _ in self.told()) - sum(1 for _ in kept.told())
        return msgspec.structs.replace(kept, left_out=self.left_out + lost)


def diff(
    old: Bundle | Manifest | Checkpoint,
    new: Bundle | Manifest | Checkpoint,
    *,
    rank: int | None = None,
    names: tuple[str, str] = ("old", "new"),
) -> DiffReport:
    """Compare two of a kind; a bundle and the manifest of one rank are compared by that rank.

    `rank` compares one rank of two bundles. Raises UsageError if the two cannot be compared, ManifestError if a rank
    cannot be read.
    """
    if isinstance(old, Checkpoint) or isinstance(new, Checkpoint):
        if not (isinstance(old, Checkpoint) and isinstance(new, Checkpoint)):
            raise UsageError(
                "a manifest and a checkpoint cannot be compared with diff",
                hint="probe-manifest check MANIFEST CHECKPOINT says whether the one fulfils the other",
            )
        if rank is not None:
            raise UsageError(f"a checkpoint has no ranks, but rank {rank} was asked for")
        return DiffReport(_side(old, names[0]), _side(new, names[1]), tuple(_checkpoints(old, new)))
    if rank is None:
        rank = next((side.rank.index for side in (old, new) if isinstance(side, Manifest)), None)
    if isinstance(old, Manifest) or isinstance(new, Manifest) or rank is not None:
        left, right = _rank(old, rank, names[0]), _rank(new, rank, names[1])
        return DiffReport(_side(left, names[0]), _side(right, names[1]), tuple(_manifests(left, right)))
    return DiffReport(_side(old, names[0]), _side(new, names[1]), tuple(_bundles(old, new)))


def _rank(side: Bundle | Manifest, rank: int | None, name: str) -> Manifest:
    if isinstance(side, Bundle):
        return side.manifest(rank)
    if rank is not None and side.rank.index != rank:
        raise UsageError(f"{name}: this is the manifest of rank {side.rank.index}, not of rank {rank}")
    return side


def _manifests(old: Manifest, new: Manifest) -> list[Change]:
    return [] if old.digest == new.digest else compare_rank(old.text, new.text, old.rank.index)


def _bundles(old: Bundle, new: Bundle) -> Iterator[Change]:
    # What an index states of a file holds if the file is there and whole, whether or not it needs comparing.
    if old.digest == new.digest:
        for rank in old.ranks:
            old.rank_text(rank), new.rank_text(rank)
        return
    index = compare_index(old.text, new.text)
    yield from index
    renamed = {c.subject: c.new["name"] for c in index if c.kind.endswith("source-renamed")}
    before = {entry.rank.index: entry for entry in old.index.ranks}
    after = {entry.rank.index: entry for entry in new.index.ranks}
    for rank in sorted(before.keys() | after.keys()):
        if rank not in after:
            yield Change(kind="rank-removed", subject=f"rank {rank}", rank=rank, old=_plain(old, rank))
        elif rank not in before:
            yield Change(kind="rank-added", subject=f"rank {rank}", rank=rank, new=_plain(new, rank))
        else:
            texts = old.rank_text(rank), new.rank_text(rank)
            if before[rank].digest != after[rank].digest:
                yield from compare_rank(*texts, rank, renamed, echo=True)


def _plain(bundle: Bundle, rank: int) -> Any:
    return msgspec.json.decode(bundle.rank_text(rank))


def _checkpoints(old: Checkpoint, new: Checkpoint) -> list[Change]:
    before, after = _sources(old), _sources(new)
    changes = compare_sources(before, after, {}, {}, source_renames(before, after), used=False)
    identities = msgspec.to_builtins(checkpoint_identity(old)), msgspec.to_builtins(checkpoint_identity(new))
    for field, kind in (
        ("kind", "checkpoint-kind-changed"),
        ("repo_id", "revision-changed"),
        ("revision", "revision-changed"),
    ):
        left, right = identities[0].get(field), identities[1].get(field)
        if left != right:
            changes.append(Change(kind=kind, subject=f"checkpoint.{field}", old=[left], new=[right]))
    if old.config_digest != new.config_digest:
        subject = "config.json"
        changes.append(Change(kind="config-changed", subject=subject, old=[old.config_digest], new=[new.config_digest]))
    return changes


def _sources(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The sources with their files by name: numbers of files mean nothing across checkpoints."""
    plain: list[dict[str, Any]] = msgspec.to_builtins([source_entry(source) for source in checkpoint.sources])
    for source in plain:
        if source.get("file") is not None:
            source["file"] = checkpoint.files[source["file"]].name
    return plain


def _side(side: Bundle | Manifest | Checkpoint, path: str) -> DiffSide:
    if isinstance(side, Checkpoint):
        return DiffSide(path, "checkpoint", side.digest)
    if isinstance(side, Bundle):
        return DiffSide(path, "bundle", side.digest, side.ranks)
    return DiffSide(path, "manifest", side.digest, (side.rank.index,))
