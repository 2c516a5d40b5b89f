"""Which files of a folder are the checkpoint, and what its index promises."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from probe_cli.checkpoint.index import MAX_INDEX, parse_index
from probe_cli.checkpoint.local import read_text
from probe_cli.checkpoint.text import some
from probe_cli.errors import CheckpointError

__all__ = ["INDEX_NAME", "Layout", "choose", "read_layout"]

INDEX_NAME = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_CONSOLIDATED = re.compile(r"consolidated.*\.safetensors$")
_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")


class Layout(NamedTuple):
    """The files of a checkpoint, sorted by name, and the index's promise (source -> file) if there is an index."""

    files: tuple[str, ...]
    index_name: str | None
    weight_map: Mapping[str, str] | None


def choose(names: Iterable[str], *, where: str) -> tuple[str | None, tuple[str, ...]]:
    """From the names in a folder (or repository): the index to use, or else the safetensors files. Raises
    CheckpointError where there is no such thing, or more than one answer."""
    listing = sorted(names)
    indices = [name for name in listing if name.endswith(_INDEX_SUFFIX)]
    if INDEX_NAME in indices:
        return INDEX_NAME, ()
    if len(indices) == 1:
        return indices[0], ()
    if indices:
        raise CheckpointError(
            f"{where}: has {len(indices)} indices ({some(indices)}), expected one",
            hint="give the path of the index that you mean",
        )
    files = [name for name in listing if name.endswith(".safetensors")]
    if not files:
        foreign = [name for name in listing if name.endswith(_FOREIGN)]
        if foreign:
            raise CheckpointError(
                f"{where}: has {some(foreign)} but no safetensors file",
                hint="convert the weights to safetensors (transformers: model.save_pretrained)",
            )
        raise CheckpointError(
            f"{where}: has no safetensors file and no {INDEX_NAME}", hint="give a folder or a file that has the weights"
        )
    consolidated = [name for name in files if _CONSOLIDATED.match(name)]
    if consolidated and len(consolidated) < len(files):
        raise CheckpointError(
            f"{where}: has {some(consolidated)} beside {some([name for name in files if name not in consolidated])} "
            "and no index that says which of them is the model",
            hint="give the path of one file, or put the files of one layout into a folder of their own",
        )
    return None, tuple(files)


def read_layout(root: Path, index: str | None = None) -> Layout:
    """The layout of a folder on disk; `index` if the user named one."""
    if index is None:
        try:
            names = [entry.name for entry in root.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be listed: {error.strerror}") from None
        index, files = choose(names, where=str(root))
        if index is None:
            return Layout(files, None, None)
    weight_map = parse_index(read_text(root / index, file=index, limit=MAX_INDEX), file=index)
    files = tuple(sorted(set(weight_map.values())))
    missing = [name for name in files if not os.path.lexists(root / name)]
    if missing:
        raise CheckpointError(
            f"{index}: names {len(missing):,} of {len(files):,} files that are not there: {some(missing)}",
            hint="download the missing shards",
        )
    return Layout(files, index, weight_map)
