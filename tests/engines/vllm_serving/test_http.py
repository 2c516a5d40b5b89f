"""`vllm serve` with the endpoints for RL, driven by a plain HTTP client: what is missing stands in the body of the error."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import ENVIRONMENT, PROMPTS
from tests.engines.vllm_serving.test_reload import MISSING, tensors

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = {
    "probe_manifest": "probe_cli.engines.vllm.serving:register",
    "file_transfer": "tests.engines.vllm_serving.transfer:register",
}


def site(folder: Path) -> Path:
    """Metadata with the entry points that vLLM looks for."""
    info = folder / "serving_test-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: serving-test\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in PLUGINS.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]) + "\n")
    return folder


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(256)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1").save_pretrained(folder)


class Client:
    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        return self._answer(request)

    def get(self, path: str) -> tuple[int, Any]:
        return self._answer(urllib.request.Request(self.url + path))

    def _answer(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text, code = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            text, code = error.read(), error.code
        return code, json.loads(text) if text[:1] in b"{[" and text else text.decode()

    def rpc(self, method: str) -> list[dict[str, Any]]:
        code, body = self.post("/collective_rpc", method=method)
        assert code == 200, body
        found: list[dict[str, Any]] = body["results"]
        return found

    def update(self, folder: Path, without: tuple[str, ...] = (), version: str | None = None) -> tuple[int, Any]:
        names = [name for name in tensors(folder) if name not in without]
        assert self.post("/start_weight_update")[0] == 200
        for start in range(0, len(names), 20):
            info = {"path": str(folder / "model.safetensors"), "names": names[start : start + 20]}
            code, body = self.post("/update_weights", update_info=info)
            assert code == 200, body
        return self.post("/finish_weight_update", weight_version=version)


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    a, b = checkpoints("qwen3-moe")
    add_tokenizer(a)
    return a, b


@pytest.fixture(scope="module")
def client(folders: tuple[Path, Path], cold: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    cold(folders[1])
    where = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PROBE_MANIFEST": "record",
        "PROBE_MANIFEST_RECEIPTS": str(where / "receipts"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site(where / "site"))]),
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders[0]),
        "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "m", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4",
        "--weight-transfer-config", '{"backend": "file-ipc"}', "--no-enable-prefix-caching",
    ]  # fmt: skip
    log = where / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=where)
    client = Client(f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                if client.get("/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        code, body = client.post("/init_weight_transfer_engine", init_info={})
        assert code == 200, body
        yield client
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def tokens(client: Client) -> list[str]:
    found = []
    for prompt in PROMPTS:
        code, body = client.post(
            "/v1/completions", model="m", prompt=prompt, max_tokens=16, temperature=0, ignore_eos=True
        )
        assert code == 200, body
        found.append(body["choices"][0]["text"])
    return found


def test_the_error_body_names_what_is_missing(client: Client, folders: tuple[Path, Path]) -> None:
    assert client.rpc("probe_manifest_receipt")[0]["tracked"] is True
    code, body = client.update(folders[1], MISSING, "v1")
    assert code == 500
    assert all(name in json.dumps(body) for name in MISSING)
    assert client.get("/weight_info")[1]["weight_version"] != "v1"
    status = client.rpc("probe_manifest_receipt")[0]
    assert status["state"] == "undefined" and len(status["receipt"]["missing"]) == 2
    assert client.get("/health")[0] == 200


def test_undefined_weights_answer_no_request(client: Client, folders: tuple[Path, Path]) -> None:
    client.update(folders[1], MISSING)
    code, body = client.post("/v1/completions", model="m", prompt=PROMPTS[0], max_tokens=4)
    assert (code, "choices" in body) == (500, False)
    assert client.get("/health")[0] == 200
    assert client.update(folders[1])[0] == 200
    assert len(tokens(client)) == 2


def test_a_request_under_way_ends_when_an_update_fails(client: Client, folders: tuple[Path, Path]) -> None:
    assert client.post("/pause?mode=keep")[0] == 200  # so that it is still there when the update fails
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.post, "/v1/completions", model="m", prompt=PROMPTS[0], max_tokens=4)
        time.sleep(0.5)
        client.update(folders[1], MISSING)
        assert waiting.result(60)[0] == 500
    assert client.post("/resume")[0] == 200
    assert client.update(folders[1])[0] == 200
    assert len(tokens(client)) == 2


def test_a_retry_repairs_and_the_generation_counts_on(client: Client, folders: tuple[Path, Path], cold: Any) -> None:
    before = client.rpc("probe_manifest_receipt")[0]["generation"]
    assert client.update(folders[1], version="v2")[0] == 200
    assert client.get("/weight_info")[1]["weight_version"] == "v2"
    status = client.rpc("probe_manifest_receipt")[0]
    assert (status["state"], status["generation"]) == ("ready", before + 1)
    assert client.rpc("probe_manifest_digests")[0] == cold(folders[1])[0]
    words = [[f"w{token}" for token in row] for row in cold(folders[1])[1][0]]
    assert [text.split() for text in tokens(client)] == words


def test_vllm_status_reads_the_server(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    from probe_cli.cli.main import main

    assert main(["vllm-status", client.url]) == 0
    assert "rank 0: ready" in capsys.readouterr().out
