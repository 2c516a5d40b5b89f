"""Headers by commit, in the Hub's own cache folder: a second run needs no network, `hf cache rm` removes them too.

    $HF_HUB_CACHE/models--org--name/probe-manifest/<commit>/<path>.headers
    $HF_HUB_CACHE/models--org--name/probe-manifest/refs/<revision>

A file is written whole or not at all, and carries a digest of its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import quote as url_quote

import msgspec

from probe_cli.checkpoint.hub.reference import COMMIT

__all__ = ["HeaderCache", "Saved", "SavedFile"]

_MAGIC = b"probe-manifest headers 1\n"
_MAX_SAVED = 4_000_000_000


class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """A safetensors file: name, size in bytes, and its header as it stands in the file."""

    name: str
    size: int
    header: bytes


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """All that a checkpoint is known by, as it came from the Hub and before it was checked."""

    repo_id: str
    commit: str
    index_name: str | None
    index: bytes | None
    config: bytes | None
    files: list[SavedFile]


class HeaderCache:
    """The cache of one repository. Reading never raises; writing fails silently where the folder is read-only."""

    def __init__(self, hub_cache: str | Path, repo_id: str) -> None:
        self._repo = Path(hub_cache) / ("models--" + repo_id.replace("/", "--"))
        self._root = self._repo / "probe-manifest"

    def snapshot(self, commit: str) -> Path:
        """Where huggingface_hub keeps the files of this commit, if they were downloaded."""
        return self._repo / "snapshots" / commit

    def commit_of(self, revision: str | None) -> str | None:
        """The commit that a revision stood for when it was last resolved, by us or by huggingface_hub."""
        name = revision or "main"
        newest: tuple[float, str] | None = None
        for path in (self._root / "refs" / url_quote(name, safe=""), self._repo / "refs" / name):
            try:
                commit, changed = path.read_text().strip(), path.stat().st_mtime
            except (OSError, ValueError):
                continue
            if COMMIT.fullmatch(commit) and (newest is None or changed > newest[0]):
                newest = changed, commit
        return newest[1] if newest else None

    def remember(self, revision: str | None, commit: str) -> None:
        """Note what a revision stands for now."""
        self._write(self._root / "refs" / url_quote(revision or "main", safe=""), commit.encode())

    def load(self, commit: str, path: str) -> Saved | None:
        """What `store` saved, None if it is not there or damaged."""
        file = self._file(commit, path)
        try:
            if file.stat().st_size > _MAX_SAVED:
                return None
            content = file.read_bytes()
            head, digest, body = content[: len(_MAGIC)], content[len(_MAGIC) :][:32], content[len(_MAGIC) + 32 :]
            if head != _MAGIC or hashlib.sha256(body).digest() != digest:
                return None
            saved = msgspec.msgpack.decode(body, type=Saved)
        except (OSError, msgspec.MsgspecError, ValueError):
            return None
        return saved if saved.commit == commit else None

    def store(self, saved: Saved, path: str) -> None:
        """Save for `load`."""
        body = msgspec.msgpack.encode(saved)
        self._write(self._file(saved.commit, path), _MAGIC + hashlib.sha256(body).digest() + body)

    def _file(self, commit: str, path: str) -> Path:
        return self._root / commit / f"{url_quote(path, safe='') or 'root'}.headers"

    def _write(self, path: Path, content: bytes) -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A repository folder without it is reported as damaged by `hf cache`.
            (self._repo / "snapshots").mkdir(exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
