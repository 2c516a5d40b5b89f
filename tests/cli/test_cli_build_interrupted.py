"""A build that is cut short leaves no half bundle and no process behind, and says which rank failed and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(__file__).with_name("models.py")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("to_group", [False, True])
def test_signals(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int, word: str, to_group: bool
) -> None:
    """To the process alone (`kill`), and to its whole group, workers included (Ctrl-C in a terminal)."""
    started, out = tmp_path / "started", tmp_path / "out"
    started.mkdir()
    engine = ["--engine", f"python:{MODELS}:slow", "--arg", f"started={started}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "probe_cli", "build", checkpoint, *engine, "--tp", "3", "-j", "2", "-o", out],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore SIGINT, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: len(list(started.iterdir())) == 2)
    workers = [int(path.name) for path in started.iterdir()]
    assert all(map(alive, workers))
    (os.killpg if to_group else os.kill)(process.pid, number)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (code, "")
    assert f"error: {word}" in stderr
    assert "Traceback" not in stderr
    assert not any(map(alive, workers))
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started"]


def test_workers_do_not_outlive_a_parent_that_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    engine = ["--engine", f"python:{MODELS}:slow", "--arg", f"started={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "probe_cli", "build", checkpoint, *engine], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: bool(list(tmp_path.iterdir())))
    (worker,) = (int(path.name) for path in tmp_path.iterdir())
    process.kill()
    process.wait()
    wait_until(lambda: not alive(worker), seconds=10)


def test_the_first_failure_stops_the_others(run, checkpoint: Path, tmp_path: Path) -> None:
    """Ranks 0 and 2 would take a minute each."""
    start = time.monotonic()
    found = run(
        "build", checkpoint, "--engine", f"python:{MODELS}:fails", "--tp", "3", "-j", "3", "-o", tmp_path / "out"
    )
    assert time.monotonic() - start < 30
    assert (found.code, found.stdout) == (3, "")
    assert (
        f"error: rank 1 (tp 1/3): {MODELS}:fails failed for rank 1 (tp 1/3): RuntimeError: no such layer: 17"
        in found.stderr
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_worker_that_is_killed_is_named(run, checkpoint: Path, tmp_path: Path) -> None:
    """What the kernel does when memory runs out."""
    found = run(
        "build", checkpoint, "--engine", f"python:{MODELS}:killed", "--tp", "2", "-j", "2", "-o", tmp_path / "out"
    )
    assert found.code == 3
    assert "error: rank 1 (tp 1/2): its worker was killed by SIGKILL\nhint: out of memory?" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_worker_prints_stays_out_of_the_result_and_debug_shows_it(run, checkpoint: Path) -> None:
    arguments = ("build", checkpoint, "--engine", f"python:{MODELS}:noisy", "--tp", "2", "-j", "1", "--format", "json")
    quiet = run(*arguments)
    assert (quiet.code, quiet.stdout) == (3, "")
    assert "straight to the descriptor" not in quiet.stderr
    loud = run("--debug", *arguments)
    assert loud.stdout == ""
    assert "--- rank 1 (tp 1/2): printed ---" in loud.stderr
    assert "to stdout, where results go\nstraight to the descriptor" in loud.stderr
    assert "RuntimeError: after saying something" in loud.stderr


def test_a_live_bar_on_a_terminal(checkpoint: Path) -> None:
    import pty

    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "probe_cli", "build", checkpoint, "--engine", "embedded", "--tp", "2"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    text = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        text += chunk
    assert process.wait() == 0
    os.close(main)
    assert "━".encode() in text
    assert b"rank 1 (tp 1/2): " in text
    assert b"\x1b[?25h" in text, "the cursor is shown again"
