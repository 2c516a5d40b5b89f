"""`Bundle`: the manifests of all ranks of a topology, as a directory of an index and one file per rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest.canonical import digest
from probe_cli.manifest.decode import decode_document, normalized, sniff, verify_digest
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.files import compress, read_text, write_bytes
from probe_cli.manifest.identity import checkpoint_identity, source_entry
from probe_cli.manifest.proof import unfed_parameters, unused_sources
from probe_cli.manifest.schema import BUNDLE_FORMAT, MANIFEST_FORMAT, SCHEMA_VERSION, BundleIndex, RankEntry
from probe_cli.manifest.swap import put_in_place
from probe_cli.manifest.text import digest_of_lines, render
from probe_cli.manifest.validate import RANK_FILE, validate_index

if TYPE_CHECKING:
    from probe_cli.checkpoint import Checkpoint

__all__ = ["INDEX_FILE", "Bundle", "check_beside_bundle", "check_replaceable"]

INDEX_FILE = "bundle.json.gz"
_INDEX_NAMES = (INDEX_FILE, "bundle.json")


class Bundle:
    """An index and the manifests that it names. A rank's file is read when it is asked for, and verified against the
    index."""

    def __init__(
        self,
        index: BundleIndex,
        manifests: Mapping[int, Manifest] | None = None,
        path: Path | None = None,
        text: bytes | None = None,
    ) -> None:
        self.index = index
        self.path = path
        self._manifests = dict(manifests or {})
        self._entries = {entry.rank.index: entry for entry in index.ranks}
        self._text = text

    @classmethod
    def build(
        cls, checkpoint: Checkpoint, manifests: Sequence[Manifest], outcomes: Sequence[Mapping[str, str]] = ()
    ) -> Bundle:
        """The bundle of these manifests, proved over all of them (rule 11).

        `outcomes` runs parallel to `manifests`: for each source that the rank does not use, "declined", "skipped" or
        "unread". Raises ManifestError if the manifests do not belong together, or a source is used by no rank and no
        outcome says why.
        """
        if not manifests:
            raise ManifestError("a bundle needs the manifest of at least one rank, got none")
        manifests = sorted(manifests, key=lambda manifest: manifest.rank.index)
        if len(outcomes) not in (0, len(manifests)):
            raise ManifestError(f"{len(outcomes)} outcomes for {len(manifests)} manifests")
        first = manifests[0].document
        identity = checkpoint_identity(checkpoint)
        for manifest in manifests:
            _belongs(manifest, first.engine, first.topology, first.model, identity)
        sources = tuple(source_entry(source) for source in checkpoint.sources)
        entries = tuple(
            RankEntry(
                rank=manifest.rank,
                file=f"rank-{manifest.rank.index:05d}.json.gz",
                digest=manifest.digest,
                contract_digest=manifest.contract_digest,
                summary=manifest.summary,
            )
            for manifest in manifests
        )
        index = BundleIndex(
            format=BUNDLE_FORMAT,
            version=SCHEMA_VERSION,
            engine=first.engine,
            topology=first.topology,
            model=first.model,
            checkpoint=identity,
            sources=sources,
            unused=unused_sources(sources, manifests, outcomes),
            unfed=unfed_parameters(manifests),
            ranks=entries,
        )
        index = msgspec.structs.replace(index, digest=digest(index))
        validate_index(index, "bundle")
        return cls(index, {manifest.rank.index: manifest for manifest in manifests})

    @classmethod
    def read(cls, path: str | Path) -> Bundle:
        """The bundle in a directory, or that of an index file. Ranks are not read yet. Raises ManifestError."""
        path = Path(path)
        file = _index_file(path) if path.is_dir() else path
        text = read_text(file)
        if sniff(text, str(file)) == MANIFEST_FORMAT:
            raise ManifestError(f"{file}: this is the manifest of one rank, expected the index of a bundle")
        index = decode_document(text, BundleIndex, str(file))
        verify_digest(text, index.digest, str(file))
        validate_index(index, str(file))
        return cls(index, path=file.parent, text=text)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global indices of the ranks that the bundle holds."""
        return tuple(self._entries)

    @property
    def digest(self) -> str:
        return self.index.digest

    def manifest(self, rank: int | None = None) -> Manifest:
        """The manifest of a rank; of the only one if `rank` is None. Raises UsageError if the bundle lacks it, and
        ManifestError if its file is not the one that the index names."""
        if rank is None and len(self._entries) == 1:
            rank = self.ranks[0]
        if rank is None or rank not in self._entries:
            asked = "which rank?" if rank is None else f"no rank {rank} in this bundle;"
            raise UsageError(
                f"{self.path or 'bundle'}: {asked} it holds {_ranges(self.ranks)}", hint="name one with --rank"
            )
        if rank in self._manifests:
            return self._manifests[rank]
        directory = self.path
        if directory is None:
            raise ManifestError(f"rank {rank}: the bundle was built without its manifest")
        entry = self._entries[rank]
        file = directory / entry.file
        manifest = Manifest.from_bytes(read_text(file), str(file))
        if manifest.digest != entry.digest or manifest.rank != entry.rank:
            raise ManifestError(
                f"{file}: this is the manifest of {manifest.rank} with digest {manifest.digest[:19]}..., but the index "
                f"expects {entry.rank} with {entry.digest[:19]}...",
                hint="the file was swapped or is of another build; build the bundle again",
            )
        return manifest

    def rank_text(self, rank: int) -> bytes:
        """The JSON text of a rank's manifest, verified against the index by its digest alone: several times faster than
        `manifest`, for those who decode a part of it. Raises as `manifest` does."""
        entry = self._entries.get(rank)
        if entry is None or rank in self._manifests or self.path is None:
            return self.manifest(rank).to_bytes()
        text = read_text(self.path / entry.file)
        if digest_of_lines(text) != (entry.digest, entry.digest):
            self.manifest(rank)  # in another form, or not what it should be: then this raises
        return text

    def manifests(self) -> Iterator[Manifest]:
        """The manifests, one rank at a time, in the order of ranks."""
        for rank in self.ranks:
            yield self.manifest(rank)

    def index_bytes(self) -> bytes:
        """The JSON text of the index file."""
        if self._text is None:
            return render(msgspec.to_builtins(self.index))
        return normalized(self._text, "bundle")

    @property
    def text(self) -> bytes:
        """The index's JSON text as it was read; that of `index_bytes` if it was not read."""
        return self.index_bytes() if self._text is None else self._text

    def write(self, directory: str | Path) -> Path:
        """Write the bundle as a directory, replacing a bundle that is there in one step.

        Raises UsageError if the path holds anything that is not a bundle, and ManifestError if it cannot be written;
        what was there stays as it was in both cases.
        """
        target = Path(os.path.realpath(directory))
        check_replaceable(target)
        new = target.with_name(f".{target.name}.{os.urandom(4).hex()}.new")
        old: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.mkdir()
                for entry in self.index.ranks:
                    text = self.manifest(entry.rank.index).to_bytes()
                    write_bytes(new / entry.file, compress(text) if entry.file.endswith(".gz") else text)
                # Last: a directory without an index is no bundle.
                write_bytes(new / INDEX_FILE, compress(self.index_bytes()))
                old = put_in_place(new, target)
                discarded = old is None or _discard(old)
            except BaseException:
                _discard(old or new)
                raise
        except OSError as error:
            raise ManifestError(f"{target}: cannot be written ({error.strerror or error})") from None
        if not discarded:
            raise ManifestError(f"{target}: written, but files that are no part of a bundle were in the old one: {old}")
        return Path(directory)


def _index_file(directory: Path) -> Path:
    for name in _INDEX_NAMES:
        if (directory / name).is_file():
            return directory / name
    raise ManifestError(f"{directory}: no {INDEX_FILE} in this directory, expected a bundle")


def _belongs(manifest: Manifest, *common: object) -> None:
    document = manifest.document
    names = ("engine", "topology", "model", "checkpoint")
    for name, own, expected in zip(
        names, (document.engine, document.topology, document.model, document.checkpoint), common
    ):
        if own != expected:
            raise ManifestError(f"{manifest.rank}: its {name} is not that of the bundle: {own}, expected {expected}")


def _is_bundle_name(name: str) -> bool:
    return name in _INDEX_NAMES or RANK_FILE.fullmatch(name) is not None


def check_replaceable(target: Path) -> None:
    """Raise UsageError unless `target` is absent, empty or a bundle and nothing else."""
    if not target.exists():
        return
    refusal = "not a bundle, so it is not replaced"
    if not target.is_dir():
        raise UsageError(f"{target}: a file, {refusal}", hint="name a directory that does not exist yet")
    entries = sorted(target.iterdir())
    for entry in entries:
        if not _is_bundle_name(entry.name) or entry.is_symlink() or not entry.is_file():
            raise UsageError(f"{target}: holds {entry.name!r}, {refusal}", hint="name a new or empty directory")
    if entries:
        try:
            is_bundle = sniff(read_text(_index_file(target)), str(target)) == BUNDLE_FORMAT
        except ManifestError:
            is_bundle = False
        if not is_bundle:
            raise UsageError(f"{target}: {refusal}", hint="remove it yourself, or name another directory")


def check_beside_bundle(file: Path) -> None:
    """Raise UsageError if writing a rank's manifest to `file` would replace a part of a bundle."""
    directory = file.parent
    if _is_bundle_name(file.name) and any((directory / name).is_file() for name in _INDEX_NAMES):
        raise UsageError(
            f"{file}: a part of the bundle in {directory}, which would no longer fit together",
            hint="name another file; or name the directory to replace the bundle",
        )


def _discard(directory: Path) -> bool:
    """Remove a bundle's files and their directory; False, and all else left, if it holds other things."""
    with contextlib.suppress(OSError):
        for entry in list(directory.iterdir()):
            if _is_bundle_name(entry.name) or entry.name.endswith(".tmp"):
                entry.unlink()
        directory.rmdir()
        return True
    return False


def _ranges(ranks: Sequence[int]) -> str:
    parts: list[str] = []
    for rank in sorted(ranks):
        if parts and rank == int(parts[-1].split("-")[-1]) + 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{rank}"
        else:
            parts.append(str(rank))
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)
