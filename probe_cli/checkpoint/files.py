"""Several safetensors files as one set of sources, held against the index that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from probe_cli.checkpoint.header import Header
from probe_cli.checkpoint.local import Stamp, read_header
from probe_cli.checkpoint.text import quote, some
from probe_cli.checkpoint.types import CheckpointFile, Source
from probe_cli.errors import CheckpointError

__all__ = ["FileSet", "join", "read_files"]


class FileSet(NamedTuple):
    """Sources by file, then by offset; one stamp per file, None where the data is not at hand."""

    sources: tuple[Source, ...]
    files: tuple[CheckpointFile, ...]
    metadata: dict[str, dict[str, str]]
    stamps: tuple[Stamp | None, ...]


def read_files(
    root: Path, names: Sequence[str], *, index: str | None = None, weight_map: Mapping[str, str] | None = None
) -> FileSet:
    """Read the headers of `names` in `root`. Raises CheckpointError."""
    headers = []
    stamps: list[Stamp | None] = []
    for name in names:
        header, whole, stamp = read_header(root / name, file=name)
        headers.append((name, header))
        stamps.append(stamp if whole else None)
    return join(headers, stamps, index=index, weight_map=weight_map)


def join(
    headers: Sequence[tuple[str, Header]],
    stamps: Sequence[Stamp | None],
    *,
    index: str | None = None,
    weight_map: Mapping[str, str] | None = None,
) -> FileSet:
    """One set of sources from the headers of all files, in the order given.

    Raises CheckpointError if a tensor stands twice, or if index and headers disagree.
    """
    sources: list[Source] = []
    owner: dict[str, int] = {}
    for at, (_, header) in enumerate(headers):
        start = header.nbytes
        sources += [
            Source(name, dtype, shape, end - begin, at, start + begin, start + end)
            for begin, end, name, dtype, shape in header.records
        ]
        owner.update(dict.fromkeys([record[2] for record in header.records], at))
    if len(owner) != len(sources):
        _refuse_twice(sources, [name for name, _ in headers])
    if weight_map is not None:
        _check_index(index or "index", weight_map, owner, [name for name, _ in headers])
    if not sources:
        names = ", ".join(name for name, _ in headers[:3])
        raise CheckpointError(
            f"{names}: no tensors, expected at least one", hint="an empty checkpoint cannot be checked"
        )
    return FileSet(
        sources=tuple(sources),
        files=tuple(CheckpointFile(name, header.file_size, header.digest) for name, header in headers),
        metadata={name: dict(header.metadata) for name, header in headers},
        stamps=tuple(stamps),
    )


def _refuse_twice(sources: Sequence[Source], files: Sequence[str]) -> NoReturn:
    first: dict[str, int | None] = {}
    for source in sources:
        other = first.setdefault(source.name, source.file)
        if other is not None and source.file is not None and other != source.file:
            raise CheckpointError(
                f"{files[source.file]}: tensor {quote(source.name)} is in {files[other]} too, expected it in one file",
                hint="remove the files that do not belong to this checkpoint",
            )
    raise CheckpointError(f"{some(list(files))}: a tensor stands twice in one file")


def _check_index(index: str, weight_map: Mapping[str, str], owner: Mapping[str, int], files: list[str]) -> None:
    if {name: files[at] for name, at in owner.items()} == weight_map:
        return
    lacking = [name for name, file in weight_map.items() if name not in owner]
    if lacking:
        file = weight_map[lacking[0]]
        raise CheckpointError(
            f"{index}: names {len(lacking):,} tensors that their files lack: {some(lacking, 1)} in {file}",
            hint="index and shards are of different checkpoints, or a shard was written again: download both again",
        )
    for name, file in weight_map.items():
        if files[owner[name]] != file:
            raise CheckpointError(
                f"{index}: places {quote(name)} in {file}, but it is in {files[owner[name]]}",
                hint="index and shards are of different checkpoints: download both again",
            )
    extra = [name for name in owner if name not in weight_map]
    if extra:
        raise CheckpointError(
            f"{files[owner[extra[0]]]}: has {len(extra):,} tensors that {index} does not name: {some(extra)}",
            hint="index and shards are of different checkpoints: download both again",
        )
