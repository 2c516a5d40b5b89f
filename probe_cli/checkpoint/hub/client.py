"""Requests to the Hub: which files a repository has, small files whole, headers by ranges, and not a byte more.

Requests go through huggingface_hub's session, so that HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, proxies and
`set_client_factory` work as for every other tool. Retries are ours: the client's helpers do not cover a body that
breaks off, and its header parser stops at 25,000,000 bytes and asks for 100,000 bytes at least (huggingface_hub 2.4).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from probe_cli.checkpoint.header import LENGTH_BYTES, header_length
from probe_cli.checkpoint.hub.failures import (
    BadAnswer,
    explain,
    is_client_error,
    is_refusal,
    is_worth_retrying,
    wait_asked_for,
)
from probe_cli.checkpoint.hub.reference import COMMIT, Reference, is_repo_id
from probe_cli.checkpoint.text import quote
from probe_cli.errors import CheckpointError

__all__ = ["Client", "Listing"]

_TRIES = 5
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 60.0
_INFO_TIMEOUT = 30.0
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
T = TypeVar("T")


class Listing(NamedTuple):
    """A repository at one commit. `files` maps names to sizes in bytes, None where the Hub does not say."""

    repo_id: str
    commit: str
    files: Mapping[str, int | None]


class Client:
    """One endpoint and one token. Methods raise CheckpointError; they may be called from several threads."""

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        from huggingface_hub import HfApi

        self._api: Any = HfApi(endpoint=endpoint, token=token, library_name="probe-manifest")
        self.endpoint: str = self._api.endpoint
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait

    def stop(self) -> None:
        """Make threads that wait for another try give up at once."""
        self._stopped.set()

    def listing(self, reference: Reference) -> Listing:
        """Resolve a revision to a commit, and list the files there. A renamed repository answers by its new name."""

        def ask() -> Listing:
            try:
                info = self._api.model_info(
                    reference.repo_id, revision=reference.revision, files_metadata=True, timeout=_INFO_TIMEOUT
                )
                listing = Listing(info.id, info.sha, {file.rfilename: file.size for file in info.siblings or ()})
            except (AttributeError, KeyError, TypeError) as error:
                raise BadAnswer(f"{self.endpoint} answered with something that is not the Hub's API") from error
            if not COMMIT.fullmatch(str(listing.commit)) or not is_repo_id(str(listing.repo_id)):
                raise BadAnswer(
                    f"the Hub named repository {quote(listing.repo_id)} at commit {quote(listing.commit)}, "
                    "expected a name and 40 hexadecimal digits"
                )
            return listing

        return self._try(str(reference), ask)

    def small_file(self, repo_id: str, commit: str, name: str, *, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        where = f"hf://{repo_id}@{commit[:12]}/{name}"

        def ask() -> bytes:
            with self._get(self._url(repo_id, commit, name), None) as response:
                data = _take(response.iter_bytes(), limit + 1)
            if len(data) > limit:
                raise CheckpointError(f"{where}: has more than {limit:,} bytes, expected at most that")
            return data

        return self._try(where, ask)

    def header(self, repo_id: str, commit: str, name: str, *, size: int | None) -> tuple[bytes, int]:
        """Length and JSON of a safetensors file, and the file's size. `size` is what the listing says."""
        where = f"hf://{repo_id}@{commit[:12]}/{name}"

        def ask() -> tuple[bytes, int]:
            url = self._url(repo_id, commit, name)
            prefix, total, storage = self._range(url, 0, LENGTH_BYTES, size)
            end = LENGTH_BYTES + header_length(prefix, total, file=where)
            try:
                # Where the first request was redirected to: spares the Hub one request for each file.
                rest, _, _ = self._range(storage, LENGTH_BYTES, end, total)
            except Exception as error:
                if storage == url or not is_refusal(error):
                    raise
                rest, _, _ = self._range(url, LENGTH_BYTES, end, total)
            return prefix + rest, total

        return self._try(where, ask)

    def _range(self, url: str, start: int, end: int, size: int | None) -> tuple[bytes, int, str]:
        """Bytes `start` to `end`, the size of the file, and the address that answered in the end.

        Raises BadAnswer if the answer is not exactly that range of a file of `size` bytes.
        """
        if size is not None:
            end = min(end, size)
        if start >= end:
            return b"", size or 0, url
        with self._get(url, f"bytes={start}-{end - 1}") as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise BadAnswer(f"the range came with Content-Encoding {quote(encoding)}, expected plain bytes")
            if response.status_code == 206:
                found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
                if found is None:
                    raise BadAnswer(f"Content-Range is {quote(response.headers.get('content-range', ''))}")
                first, last, total = (int(part) for part in found.groups())
                end = min(end, total)
                if (first, last) != (start, end - 1):
                    raise BadAnswer(f"the Hub sent bytes {first}-{last}, expected {start}-{end - 1}")
                data = _take(response.iter_raw(), end - start + 1)
                skipped = 0
            else:
                # The server ignores ranges. Take no more of the stream than what we came for, then hang up.
                length = response.headers.get("content-length", "")
                if not length.isdecimal():
                    raise BadAnswer("the server ignores ranges and does not say how long the file is")
                total = int(length)
                end = min(end, total)
                data = _take(response.iter_raw(), end)[start:end]
                skipped = start
        if size is not None and total != size:
            raise BadAnswer(f"the file has {total:,} bytes, expected {size:,} by the listing")
        if len(data) != end - start:
            raise BadAnswer(f"the Hub sent {len(data) + skipped:,} bytes, expected {end - start + skipped:,}")
        return data, total, str(response.url)

    def _url(self, repo_id: str, commit: str, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(repo_id, name, revision=commit, endpoint=self.endpoint)

    def _get(self, url: str, byte_range: str | None) -> Any:
        """An open response with a good status, as a context manager."""
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        # Storage has another origin, and its address is signed: the token is not for it.
        own = urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]
        headers = build_hf_headers(token=self._api.token if own else False, library_name="probe-manifest")
        headers["Accept-Encoding"] = "identity"
        if byte_range is not None:
            headers["Range"] = byte_range
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return _Checked(get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout))

    def _try(self, where: str, ask: Callable[[], T]) -> T:
        wait = _FIRST_WAIT
        for tries in range(1, _TRIES + 1):
            try:
                return ask()
            except CheckpointError:
                raise
            except Exception as error:
                if not is_client_error(error):
                    raise
                asked = wait_asked_for(error)
                if (
                    tries == _TRIES
                    or self._stopped.is_set()
                    or not is_worth_retrying(error)
                    or (asked or 0) > _LONGEST_WAIT
                ):
                    raise explain(error, where, self.endpoint, tries=tries) from error
                self._sleep(wait if asked is None else asked)
                wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError("unreachable")


class _Checked:
    """A response that raises huggingface_hub's errors for a bad status when it is entered."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        from huggingface_hub import hf_raise_for_status

        response = self._stream.__enter__()
        try:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if response.status_code not in (200, 206):
                raise BadAnswer(f"the Hub answered with status {response.status_code}")
        except BaseException as error:
            self._stream.__exit__(type(error), error, error.__traceback__)
            raise
        return response

    def __exit__(self, *details: Any) -> Any:
        return self._stream.__exit__(*details)


def _take(parts: Iterator[bytes], count: int) -> bytes:
    """The first `count` bytes of a body, fewer if it ends before. The rest is left unread."""
    taken: list[bytes] = []
    have = 0
    for part in parts:
        taken.append(part)
        have += len(part)
        if have >= count:
            break
    return b"".join(taken)[:count]
