"""One type for every checkpoint: files on disk, a sharded folder, the Hub, or a wire file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from probe_cli.checkpoint.config import CONFIG_NAME, config_digest, read_config
from probe_cli.checkpoint.files import FileSet, read_files
from probe_cli.checkpoint.folder import read_layout
from probe_cli.checkpoint.local import Stamp, read_range
from probe_cli.checkpoint.order import arrange
from probe_cli.checkpoint.text import quote
from probe_cli.checkpoint.types import CheckpointFile, Source, sources_digest
from probe_cli.checkpoint.wire import read_wire
from probe_cli.errors import CheckpointError, UsageError

__all__ = ["Checkpoint"]


class Checkpoint(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A checkpoint as its headers tell it. Immutable, picklable, cheap to copy; weights stay on disk until `read`.

    `sources` stand in the order of loading. `kind` is "files" or "wire". `root` is the folder, None for a wire file or
    the Hub. `metadata` maps a file's name to its `__metadata__`, `config` is the content of config.json.
    """

    sources: tuple[Source, ...]
    files: tuple[CheckpointFile, ...] = ()
    metadata: Mapping[str, Mapping[str, str]] = {}
    config: Mapping[str, Any] | None = None
    root: Path | None = None
    kind: str = "files"
    revision: str | None = None
    repo_id: str | None = None
    _stamps: tuple[Stamp | None, ...] = ()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        order: str = "file",
        revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Checkpoint:
        """Open a safetensors file, a folder (with an index or without), an index file, or a repository on the Hub.

        Only headers are read. A file that holds nothing but its header is fine: `has_data` is False for its sources. A
        repository is `hf://org/name@revision`, or `org/name@revision` where no such folder exists; `progress` is called with the
        number of headers that have arrived, and of all. Raises CheckpointError.
        """
        # A Path has lost one of the slashes of hf://.
        text = re.sub(r"^hf:/+", "hf://", str(path))
        where = Path(path)
        on_hub = text.startswith("hf://")
        if not on_hub and not os.path.lexists(where):
            # Imported only here: most runs never see the Hub.
            from probe_cli.checkpoint.hub.reference import looks_like_repo

            on_hub = looks_like_repo(text)
            if not on_hub:
                raise CheckpointError(
                    f"{text}: no such file or folder", hint="a repository on the Hub is hf://org/name"
                )
        if on_hub:
            opened = cls._hub(text, revision, progress)
        elif revision is not None:
            raise UsageError(f"{text} is local and has no revisions, but revision {quote(revision)} was given")
        else:
            opened = cls._local(where)
        return opened if order == "file" else opened.reordered(order)

    @classmethod
    def _local(cls, where: Path) -> Checkpoint:
        if os.path.isdir(where):
            return cls._folder(where, None)
        if where.name.endswith(".index.json"):
            return cls._folder(where.parent, where.name)
        return cls._of_files(where.parent, read_files(where.parent, (where.name,)))

    @classmethod
    def _hub(cls, text: str, revision: str | None, progress: Callable[[int, int], None] | None) -> Checkpoint:
        from probe_cli.checkpoint.hub import open_hub, parse_reference

        try:
            found = open_hub(parse_reference(text, revision), progress=progress)
        except CheckpointError as error:
            if not text.startswith("hf://"):
                error.hint = f"there is no folder {text} either; if you meant the repository: {error.hint}"
            raise
        if found.snapshot is not None:
            local = cls._local(found.snapshot)
            return msgspec.structs.replace(local, repo_id=found.repo_id, revision=found.commit)
        return cls(
            sources=found.files.sources,
            files=found.files.files,
            metadata=found.files.metadata,
            config=found.config,
            revision=found.commit,
            repo_id=found.repo_id,
            _stamps=found.files.stamps,
        )

    @classmethod
    def from_wire(cls, path: str | Path, *, config: Mapping[str, Any] | str | Path | None = None) -> Checkpoint:
        """A wire file ("-" for standard input): sources without bytes. `config` is a config.json or its content."""
        sources = read_wire(path)
        if isinstance(config, (str, Path)):
            config = read_config(Path(config), file=str(config))
        return cls(sources=sources, kind="wire", config=config)

    @classmethod
    def _folder(cls, root: Path, index: str | None) -> Checkpoint:
        layout = read_layout(root, index)
        opened = read_files(root, layout.files, index=layout.index_name, weight_map=layout.weight_map)
        return cls._of_files(root, opened)

    @classmethod
    def _of_files(cls, root: Path, opened: FileSet) -> Checkpoint:
        config = root / CONFIG_NAME
        return cls(
            sources=opened.sources,
            files=opened.files,
            metadata=opened.metadata,
            config=read_config(config) if os.path.lexists(config) else None,
            root=root,
            _stamps=opened.stamps,
        )

    @cached_property
    def _by_name(self) -> dict[str, Source]:
        return {source.name: source for source in self.sources}

    @cached_property
    def digest(self) -> str:
        """That of the sources (`sources_digest`): equal for any order and sharding of the same tensors."""
        return sources_digest(self.sources)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all sources."""
        return sum(source.nbytes for source in self.sources)

    @cached_property
    def config_digest(self) -> str | None:
        """SHA-256 of config.json in canonical form."""
        return None if self.config is None else config_digest(self.config)

    def names(self) -> tuple[str, ...]:
        """Names of the sources, in order."""
        return tuple(source.name for source in self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[str]:
        return (source.name for source in self.sources)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Source:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"the checkpoint has no tensor {quote(name)}") from None

    def __repr__(self) -> str:
        return f"<Checkpoint {self.kind}: {len(self)} sources in {len(self.files)} files, {self.nbytes} bytes>"

    def reordered(self, order: str | Sequence[str]) -> Checkpoint:
        """The same checkpoint with its sources by "file", "name" or "layer", or in the order of the names given."""
        return msgspec.structs.replace(self, sources=arrange(self.sources, order))

    def has_data(self, source: Source) -> bool:
        """True if `read` can give the bytes: the file is here and holds more than its header."""
        return source.nbytes == 0 or (source.file is not None and self._stamps[source.file] is not None)

    def read(self, source: Source) -> bytes:
        """The bytes of a source, little-endian and row-major as they stand in the file.

        Raises CheckpointError if they are not at hand, or if the file changed since the checkpoint was opened.
        """
        if source.nbytes == 0:
            return b""
        if source.file is None:
            raise _no_bytes(source, "a wire file")
        name, stamp = self.files[source.file].name, self._stamps[source.file]
        if stamp is None or self.root is None:
            origin = f"the header of {name}" + (" on the Hub" if self.repo_id else "")
            raise _no_bytes(source, origin)
        return read_range(self.root / name, source.start, source.end, file=name, stamp=stamp)


def _no_bytes(source: Source, origin: str) -> CheckpointError:
    return CheckpointError(
        f"{quote(source.name)} is known from {origin} alone, expected its bytes",
        hint="give a folder that has the weights (from the Hub: `hf download org/name`)",
    )
