"""Open a checkpoint on the Hub: resolve once, look in the caches, fetch what is missing, check all of it."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from probe_cli.checkpoint.config import CONFIG_NAME, MAX_CONFIG, parse_config
from probe_cli.checkpoint.files import FileSet, join
from probe_cli.checkpoint.folder import choose
from probe_cli.checkpoint.header import LENGTH_BYTES, Header, header_length, parse_header
from probe_cli.checkpoint.hub.cache import HeaderCache, Saved, SavedFile
from probe_cli.checkpoint.hub.client import Client, Listing
from probe_cli.checkpoint.hub.reference import COMMIT, Reference
from probe_cli.checkpoint.index import MAX_INDEX, parse_index
from probe_cli.checkpoint.local import decode_text
from probe_cli.checkpoint.text import some
from probe_cli.errors import CheckpointError

__all__ = ["HubCheckpoint", "Progress", "open_hub"]

#: Called with the number of headers that are here, and of all.
Progress = Callable[[int, int], None]
_WORKERS = 8
_ELSEWHERE = FileSet((), (), {}, ())


class HubCheckpoint(NamedTuple):
    """What the Hub (or its cache) knows of a checkpoint.

    `snapshot` is set where all files lie in the local cache: they can be opened like any folder or file.
    """

    repo_id: str
    commit: str
    files: FileSet
    config: Mapping[str, Any] | None = None
    snapshot: Path | None = None


def open_hub(
    reference: Reference,
    *,
    progress: Progress | None = None,
    client: Client | None = None,
    hub_cache: str | Path | None = None,
) -> HubCheckpoint:
    """Headers, index and config of a repository at one commit. Raises CheckpointError.

    Looks for a complete download first, then for headers of an earlier run, and asks the Hub last. A commit hash that
    is cached needs no request at all; a branch or tag needs one, unless HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    offline = bool(constants.HF_HUB_OFFLINE)
    cache = HeaderCache(hub_cache or constants.HF_HUB_CACHE, reference.repo_id)
    listing: Listing | None = None
    commit = reference.revision if reference.revision and COMMIT.fullmatch(reference.revision) else None
    if commit is None and offline:
        commit = cache.commit_of(reference.revision)
    if commit is not None:
        found = _from_cache(cache, reference, commit)
        if found is not None:
            return found
    if offline:
        raise CheckpointError(
            f"{reference}: is not in the cache, and HF_HUB_OFFLINE is set",
            hint="run once online, or unset HF_HUB_OFFLINE",
        )
    client = client or Client()
    listing = client.listing(reference)
    cache.remember(reference.revision, listing.commit)
    found = _from_cache(cache, reference, listing.commit)
    if found is not None:
        return found._replace(repo_id=listing.repo_id)
    saved = _fetch(client, listing, reference.path, progress)
    checked = _check(saved)
    cache.store(saved, reference.path)
    return checked


def _from_cache(cache: HeaderCache, reference: Reference, commit: str) -> HubCheckpoint | None:
    snapshot = cache.snapshot(commit) / reference.path
    saved = cache.load(commit, reference.path)
    if saved is None:
        if not _is_complete(snapshot):
            return None
        return HubCheckpoint(reference.repo_id, commit, _ELSEWHERE, snapshot=snapshot)
    folder = snapshot if os.path.isdir(snapshot) else snapshot.parent
    if all(os.path.exists(folder / file.name) for file in saved.files):
        return HubCheckpoint(saved.repo_id, commit, _ELSEWHERE, snapshot=snapshot)
    return _check(saved)


def _is_complete(snapshot: Path) -> bool:
    """True if a download is surely whole. Shards without an index are not: some may be missing."""
    if snapshot.name.endswith(".safetensors"):
        return os.path.isfile(snapshot)
    if not os.path.isdir(snapshot):
        return False
    names = [path.name for path in snapshot.iterdir()]
    try:
        index_name, files = choose(names, where=str(snapshot))
        if index_name is None:
            return files == ("model.safetensors",)
        text = decode_text((snapshot / index_name).read_bytes(), file=index_name)
        return all(os.path.exists(snapshot / name) for name in parse_index(text, file=index_name).values())
    except (CheckpointError, OSError):
        return False


def _fetch(client: Client, listing: Listing, path: str, progress: Progress | None) -> Saved:
    repo_id, commit = listing.repo_id, listing.commit
    where = f"hf://{repo_id}@{commit[:12]}"
    folder, names, index_name = _layout(listing, path, where)
    config = index = None
    if f"{folder}{CONFIG_NAME}" in listing.files:
        config = client.small_file(repo_id, commit, f"{folder}{CONFIG_NAME}", limit=MAX_CONFIG)
    if index_name is not None:
        index = client.small_file(repo_id, commit, f"{folder}{index_name}", limit=MAX_INDEX)
        weight_map = parse_index(decode_text(index, file=index_name), file=index_name)
        names = tuple(sorted(set(weight_map.values())))
        missing = [name for name in names if f"{folder}{name}" not in listing.files]
        if missing:
            raise CheckpointError(
                f"{where}: {index_name} names {len(missing):,} of {len(names):,} files that are not in the repository: "
                f"{some(missing)}",
                hint="the upload is not complete: tell the owner of the repository",
            )

    def fetch_one(name: str) -> SavedFile:
        header, size = client.header(repo_id, commit, f"{folder}{name}", size=listing.files[f"{folder}{name}"])
        return SavedFile(name, size, header)

    files = _in_parallel(fetch_one, names, progress, client.stop)
    return Saved(repo_id, commit, index_name, index, config, files)


def _layout(listing: Listing, path: str, where: str) -> tuple[str, tuple[str, ...], str | None]:
    """The folder (with its slash), the files if the listing tells, and else the index."""
    if path in listing.files:
        folder, slash, name = path.rpartition("/")
        if name.endswith(".safetensors"):
            return folder + slash, (name,), None
        if name.endswith(".safetensors.index.json"):
            return folder + slash, (), name
        raise CheckpointError(f"{where}/{path}: is not a safetensors file")
    folder = f"{path}/" if path else ""
    inside = [name[len(folder) :] for name in listing.files if name.startswith(folder)]
    if not inside:
        raise CheckpointError(f"{where}: has no file or folder {path!r}")
    index_name, names = choose([name for name in inside if "/" not in name], where=f"{where}/{path}".rstrip("/"))
    return folder, names, index_name


def _in_parallel(
    fetch_one: Callable[[str], SavedFile],
    names: Sequence[str],
    progress: Progress | None,
    stop: Callable[[], None],
) -> list[SavedFile]:
    """Headers of all files, in order. The first failure ends all."""
    done = 0
    if progress:
        progress(done, len(names))
    with concurrent.futures.ThreadPoolExecutor(min(_WORKERS, len(names)), thread_name_prefix="headers") as pool:
        futures = [pool.submit(fetch_one, name) for name in names]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                done += 1
                if progress:
                    progress(done, len(names))
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _check(saved: Saved) -> HubCheckpoint:
    headers: list[tuple[str, Header]] = []
    for file in saved.files:
        length = header_length(file.header[:LENGTH_BYTES], file.size, file=file.name)
        if len(file.header) != LENGTH_BYTES + length:
            raise CheckpointError(f"{file.name}: has {len(file.header):,} bytes of header, expected {length + 8:,}")
        header = parse_header(file.header, file=file.name)
        if header.file_size != file.size:
            raise CheckpointError(
                f"{file.name}: has {file.size:,} bytes on the Hub, expected {header.file_size:,} by its header",
                hint="the upload is not complete: tell the owner of the repository",
            )
        headers.append((file.name, header))
    weight_map = None
    if saved.index is not None and saved.index_name is not None:
        weight_map = parse_index(decode_text(saved.index, file=saved.index_name), file=saved.index_name)
    files = join(headers, [None] * len(headers), index=saved.index_name, weight_map=weight_map)
    config = None if saved.config is None else parse_config(decode_text(saved.config, file=CONFIG_NAME))
    return HubCheckpoint(saved.repo_id, saved.commit, files, config)
