"""`vllm serve` in a process of its own with the endpoints for RL and this plugin, and a plain HTTP client for it."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines.vllm_serving.serving import ENVIRONMENT, PROMPTS
from tests.engines.vllm_serving.test_reload import tensors

__all__ = ["Client", "add_tokenizer", "server", "tokens"]

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


@contextmanager
def server(folder: Path, where: Path, *flags: str) -> Iterator[Client]:
    """A server of one checkpoint on loopback; its log and its receipts are in `where`."""
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
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "m", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4",
        "--weight-transfer-config", '{"backend": "file-ipc"}', "--no-enable-prefix-caching", *flags,
    ]  # fmt: skip
    log = where / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=where)
    client = Client(f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-4000:]
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
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tokens(client: Client) -> list[str]:
    found = []
    for prompt in PROMPTS:
        code, body = client.post(
            "/v1/completions", model="m", prompt=prompt, max_tokens=16, temperature=0, ignore_eos=True
        )
        assert code == 200, body
        found.append(body["choices"][0]["text"])
    return found
