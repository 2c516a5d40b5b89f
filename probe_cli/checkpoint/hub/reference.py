"""Names of checkpoints on the Hub: `org/name`, `hf://org/name@revision`, `hf://org/name@revision/folder-or-file`."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.errors import UsageError

__all__ = ["COMMIT", "SCHEME", "Reference", "is_repo_id", "looks_like_repo", "parse_reference"]

SCHEME = "hf://"
#: A full commit hash: names one state of a repository for ever.
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,95})"
_REPO = re.compile(rf"(?:{_PART}/)?{_PART}")
#: Revisions with a slash in them, as huggingface_hub's `hf://` paths have them.
_SPECIAL = re.compile(r"refs/(?:pr/[0-9]+|convert/[A-Za-z0-9_.-]+)")
#: What git allows in no name of a branch or tag (git check-ref-format). `..` above all: as a part of an address it would
#: silently mean the default branch.
_NO_REF = re.compile(r"^$|\.\.|[ ~^:?*\[\\]|@\{|//|^[/.]|[/.]$")
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")


class Reference(NamedTuple):
    """A repository, the revision that was asked for (None: the default branch) and a path inside, "" for the root."""

    repo_id: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repo_id}{revision}" + (f"/{self.path}" if self.path else "")


def is_repo_id(text: str) -> bool:
    """True if `text` is a repository name, with or without an organization."""
    return _REPO.fullmatch(text) is not None and "--" not in text and ".." not in text


def looks_like_repo(text: str) -> bool:
    """True if `text` could be `org/name` or `org/name@revision`; whether there is such a folder or file is for the
    caller to see first."""
    repo_id, at, revision = text.partition("@")
    return (
        is_repo_id(repo_id)
        and repo_id.count("/") == 1
        and not text.endswith(".safetensors")
        and (not at or bool(revision.strip("/")))
    )


def parse_reference(text: str, revision: str | None = None) -> Reference:
    """The reference in `org/name` or `hf://...`; `revision` is what the user gave apart. Raises UsageError."""
    body = text.removeprefix(SCHEME)
    repo_id, at, rest = body.partition("@")
    inside = None
    if at:
        special = _SPECIAL.match(rest)
        inside = special.group() if special else rest.partition("/")[0]
        path = rest[len(inside) :].strip("/")
        inside = unquote(inside)
    else:
        parts = body.split("/")
        if parts[0] == "models" and len(parts) > 2:
            parts = parts[1:]
        repo_id, path = "/".join(parts[:2]), "/".join(parts[2:]).strip("/")
    repo_id = repo_id.removeprefix("models/")
    if repo_id.split("/")[0] in _OTHER_KINDS:
        raise UsageError(f"{quote(text)} is not a model repository, expected hf://org/name")
    if not is_repo_id(repo_id) or not is_plain(text):
        raise UsageError(f"{quote(text)} is not a repository name, expected hf://org/name or hf://org/name@revision")
    if inside is not None and revision is not None and inside != revision:
        raise UsageError(f"{quote(text)} names revision {quote(inside)}, but revision {quote(revision)} was given too")
    chosen = inside if inside is not None else revision
    if chosen is not None and (_NO_REF.search(chosen) or not is_plain(chosen) or len(chosen) > 255):
        raise UsageError(f"revision {quote(chosen)} is not a branch, tag or commit hash")
    if {"..", "."} & set(path.split("/")):
        raise UsageError(f"{quote(text)} names a path outside the repository")
    return Reference(repo_id, chosen, path)
