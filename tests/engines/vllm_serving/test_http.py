"""`vllm serve` with the endpoints for RL, driven by a plain HTTP client: what is missing stands in the body of the error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.http_server import Client, add_tokenizer, server, tokens
from tests.engines.vllm_serving.serving import PROMPTS
from tests.engines.vllm_serving.test_reload import MISSING

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    a, b = checkpoints("qwen3-moe")
    add_tokenizer(a)
    return a, b


@pytest.fixture(scope="module")
def client(folders: tuple[Path, Path], cold: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    cold(folders[1])
    with server(folders[0], tmp_path_factory.mktemp("server")) as running:
        yield running


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
