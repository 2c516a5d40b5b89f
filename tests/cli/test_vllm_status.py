"""`vllm-status` against a server that answers as vLLM's `/collective_rpc` does, and against a folder of receipts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from probe_cli.cli.main import main

KEY = "a.k.weight -> a.qkv.weight [loaded_shard_id=k]"


def receipt(ok: bool, update: int = 1) -> dict[str, Any]:
    return {
        "ok": ok, "update": update, "observed": 3 - (not ok), "expected": 3, "bytes_published": 4_500_000, "seconds": 0.25,
        "extras": 0, "declined": 1, "missing": [] if ok else [[KEY, 1]], "error": "" if ok else "incomplete",
    }  # fmt: skip


def worker(rank: int, ok: bool = True) -> dict[str, Any]:
    state = "ready" if ok else "undefined"
    return {"role": "main", "rank": rank, "tracked": True, "state": state, "generation": 7, "receipt": receipt(ok)}


class Handler(BaseHTTPRequestHandler):
    answer: bytes = b""
    code = 200

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/collective_rpc" and asked == {"method": "probe_manifest_receipt"}
        self.send_response(type(self).code)
        self.end_headers()
        self.wfile.write(type(self).answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def answer(results: Any, code: int = 200) -> None:
    Handler.answer, Handler.code = json.dumps(results).encode(), code


def test_all_workers_ready_is_clean(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer({"results": [worker(0), worker(1)]})
    assert main(["vllm-status", server]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0: ready, generation 7"
    assert lines[1] == "  update 1 ok: 3 of 3 applications, 4.5 MB published in 0.25 s, 0 extras, 1 declined"
    assert lines[2] == "rank 1: ready, generation 7"


def test_a_failed_worker_is_a_finding_with_the_missing_names(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer({"results": [worker(0), worker(1, ok=False)]})
    assert main(["vllm-status", server]) == 1
    out = capsys.readouterr().out
    assert "rank 1: undefined, generation 7" in out and f"  missing: {KEY}" in out


def test_an_untracked_worker_is_a_finding(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer({"results": [{"tracked": False, "state": "untracked", "reason": "PROBE_MANIFEST is not set", "generation": 0}]})
    assert main(["vllm-status", server]) == 1
    assert "not tracked: PROBE_MANIFEST is not set" in capsys.readouterr().out


def test_weights_loaded_past_an_update_are_a_finding(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer({"results": [worker(0), {**worker(1), "untracked_loads": 2}]})
    assert main(["vllm-status", server]) == 1
    assert "2 calls of load_weights outside an update" in capsys.readouterr().out


def test_json_carries_every_worker(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer({"results": [worker(0)]})
    assert main(["vllm-status", server, "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"version": "1.0", "healthy": True, "workers": [worker(0)]}


@pytest.mark.parametrize(
    ("results", "code", "said"),
    [
        ({}, 404, "VLLM_SERVER_DEV_MODE=1"),
        ({}, 500, "HTTP 500"),
        ({"results": ["x"]}, 200, "not that of a vLLM server"),
        ({"results": []}, 200, "no worker answered"),
        ([1], 200, "not that of a vLLM server"),
    ],
)
def test_other_answers_are_trouble(
    server: str, results: Any, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(results, code)
    assert main(["vllm-status", server]) == 2
    assert said in capsys.readouterr().err


def test_no_server_and_no_url_are_trouble(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["vllm-status", "http://127.0.0.1:9"]) == 2
    assert main(["vllm-status", "file:///etc/passwd"]) == 2
    assert "no http(s) URL" in capsys.readouterr().err
    assert main(["vllm-status", "--receipts", str(tmp_path)]) == 2
    assert main(["vllm-status", "http://x", "--receipts", str(tmp_path)]) == 2


def test_the_last_receipt_of_each_rank_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, update, ok in ((0, 9, False), (0, 10, True), (1, 10, False)):
        path = tmp_path / f"receipt-rank{rank}-update{update}.json"
        path.write_text(json.dumps(receipt(ok, update)))
    assert main(["vllm-status", "--receipts", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0: ready" and lines[1].startswith("  update 10 ok")
    assert lines[2] == "rank 1: failed" and lines[4] == f"  missing: {KEY}"


def test_a_broken_receipt_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "receipt-rank0-update1.json").write_text("[")
    assert main(["vllm-status", "--receipts", str(tmp_path)]) == 2
    assert "not a receipt" in capsys.readouterr().err
