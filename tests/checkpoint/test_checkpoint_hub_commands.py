"""The commands against a local Hub: what is named how, what is told on the way."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import FakeHub, serve
from test_checkpoint_hub import COMMIT, SHARDS, repo

COMMAND = [sys.executable, "-m", "probe_cli"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve(FakeHub()) as fake:
        yield fake


@pytest.fixture
def hub(server: FakeHub) -> FakeHub:
    server.reset()
    server.repos["org/name"] = repo(SHARDS)
    return server


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    client = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    return {**os.environ, **client, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": root, "TERM": "xterm"}


def test_revisions_are_named_with_an_at_sign(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    command = [*COMMAND, "diff", "org/name@v1.0", "hf://org/name@refs/pr/1", "--format", "json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [document[side]["path"] for side in ("old", "new")] == ["org/name@v1.0", "hf://org/name@refs/pr/1"]
    assert document["changes"] == []
    assert [r.path.partition("?")[0] for r in hub.of_kind("/api/")] == [
        "/api/models/org/name/revision/v1.0",
        "/api/models/org/name/revision/refs%2Fpr%2F1",
    ]
    # Without a terminal one line; of the second nothing had to be fetched.
    assert done.stderr == "fetching the headers of 2 files\n"


def test_a_terminal_sees_the_headers_arrive(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    ours, theirs = pty.openpty()
    command = [*COMMAND, "check", "wrong.json", f"hf://org/name@{COMMIT}"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
    os.close(theirs)
    seen = os.read(ours, 65_536).decode()
    os.close(ours)
    assert done.returncode == 2
    assert seen == "".join(f"\r\x1b[2K{text}" for text in ("headers: 0 of 2 files", "headers: 1 of 2 files", ""))
