"""Names of repositories: what is one, what is a path, and what never reaches a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.hub.reference import Reference, looks_like_repo, parse_reference
from probe_cli.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", Reference("org/name")),
        ("hf://org/name", Reference("org/name")),
        ("hf://models/org/name", Reference("org/name")),
        ("hf://gpt2", Reference("gpt2")),
        ("hf://org/name@v1.0", Reference("org/name", "v1.0")),
        ("hf://org/name@refs/pr/7", Reference("org/name", "refs/pr/7")),
        ("hf://org/name@refs/pr/7/sub/model.safetensors", Reference("org/name", "refs/pr/7", "sub/model.safetensors")),
        ("hf://org/name@feature%2Fx/sub", Reference("org/name", "feature/x", "sub")),
        ("hf://org/name/sub/", Reference("org/name", None, "sub")),
        ("hf://org/name.v1-x_2", Reference("org/name.v1-x_2")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(text, expected.revision) == expected


def test_revision_given_apart() -> None:
    assert parse_reference("org/name", "v2") == Reference("org/name", "v2")
    with pytest.raises(UsageError, match="names revision 'v1', but revision 'v2' was given too"):
        parse_reference("hf://org/name@v1", "v2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/org/name", "is not a model repository"),
        ("hf://", "is not a repository name"),
        ("hf://org/../etc", "is not a repository name"),
        ("hf://org/a..b", "is not a repository name"),
        ("hf://-org/name", "is not a repository name"),
        ("hf://org/na me", "is not a repository name"),
        ("hf://org/name@", "is not a branch, tag or commit hash"),
        ("hf://org/name@%2e%2e", "revision '..' is not a branch, tag or commit hash"),
        ("hf://org/name@.", "revision '.' is not a branch, tag or commit hash"),
        ("hf://org/name@a%2F..%2Fb", "revision 'a/../b' is not a branch, tag or commit hash"),
        ("hf://org/name@a?b=c", "is not a branch, tag or commit hash"),
        ("hf://org/name@x y", "is not a branch, tag or commit hash"),
        ("hf://org/name@x\ny", "is not a repository name"),
        ("hf://org/name/../../x", "names a path outside the repository"),
    ],
)
def test_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_reference(text)


@pytest.mark.parametrize(
    "text",
    [
        *("./org/name", "/org/name", "name", "a/b/c", "org/x.safetensors", "../name", "org/name/"),
        *("a@b", "org/name@", "a/b/c@v1", "a@b/c"),
    ],
)
def test_what_looks_like_a_path_is_one(text: str) -> None:
    assert not looks_like_repo(text)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Checkpoint.open(text)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("org/name", Reference("org/name")),
        ("org/name@v1.0", Reference("org/name", "v1.0")),
        ("org/name@refs/pr/7", Reference("org/name", "refs/pr/7")),
    ],
)
def test_a_repository_needs_no_scheme(text: str, reference: Reference) -> None:
    assert looks_like_repo(text)
    assert parse_reference(text) == reference


def test_path_object_that_lost_a_slash() -> None:
    with pytest.raises(UsageError, match="'hf://datasets/org/name' is not a model repository"):
        Checkpoint.open(Path("hf://datasets/org/name"))


def test_local_files_have_no_revisions(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="is local and has no revisions"):
        Checkpoint.open(str(tmp_path), revision="main")


@pytest.mark.parametrize(
    "revision", ["", ".", "..", "../other", "a..b", "/main", "main/", "a b", "v1~1", "HEAD^", "a:b"]
)
def test_what_git_allows_in_no_name_is_no_revision(revision: str) -> None:
    """The Hub's address of `..` is that of the default branch."""
    with pytest.raises(UsageError, match="is not a branch, tag or commit hash"):
        parse_reference("hf://org/name", revision)


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/7", "feature/x@2", "größe", "0" * 40, "a.b-c_d"])
def test_names_of_branches_are_revisions(revision: str) -> None:
    assert parse_reference("hf://org/name", revision).revision == revision
