"""Each architecture that vLLM runs on CPUs: start on A, reload A, update to B; every tensor, token and log-probability as in a cold
engine on B; and the manifest built offline is the contract recorded in the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import ENVIRONMENT

pytestmark = pytest.mark.vllm

#: qwen3-moe is the model of all other tests of this folder.
MODELS = (
    "llama", "llama-tied", "qwen3", "gemma3", "phi3", "gpt-oss", "mixtral", "deepseek-v2", "deepseek-v3", "falcon-h1",
    "granitemoehybrid",
)  # fmt: skip

#: One process for all: importing vLLM takes as long as three of these engines.
BUILD = """
import sys
from probe_cli.cli.main import main

for folder in sys.argv[1:]:
    code = main(["build", folder + "/A", "--engine", "vllm", "-o", folder + "/bundle"])
    print("BUILT", folder, code, flush=True)
"""
UPDATE = """
import json, sys, traceback
from pathlib import Path
from tests.engines.vllm_serving.serving import serve

def state(served):
    tokens = served.tokens()
    return tokens, served.digests  # after generation: it settles the dtype of rotary caches

def check(a, b):
    with serve(b) as cold:
        expected = state(cold)
    del cold
    with serve(a, "record") as served:
        first = state(served)
        served.reload(weights_path=str(a))
        same = state(served) == first
        served.reload(weights_path=str(b))
        receipt = served.status["receipt"]
        harm = [f for f in receipt["findings"] if f["kind"] not in ("settled", "refreshed")]
        return {
            "contract": served.status["contract_digest"], "same": same, "updated": state(served) == expected,
            "differ": first[0] != expected[0], "extras": receipt["extras"], "unknown": receipt["unknown_sources"],
            "harm": harm,
        }

for folder in map(Path, sys.argv[1:]):
    try:
        found = check(folder / "A", folder / "B")
    except Exception:
        found = {"error": traceback.format_exc()[-2000:]}
    print("RESULT", json.dumps([folder.name, found]), flush=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    from tests.engines.vllm.zoo import CONFIG_JSON
    from tests.engines.vllm_serving.checkpoints import save

    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        for seed, letter in enumerate("AB", 1):
            config = save(name, root / name / letter, seed) / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), **CONFIG_JSON.get(name, {})}))
    return [str(root / name) for name in MODELS]


def run(script: str, folders: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *folders], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def offline(folders: list[str]) -> dict[str, str]:
    """Model -> contract of the manifest that was built without the engine."""
    from probe_cli.manifest import Manifest

    assert run(BUILD, folders).count("BUILT") == len(folders)
    return {Path(folder).name: Manifest.read(f"{folder}/bundle", 0).contract_digest for folder in folders}


@pytest.fixture(scope="module")
def updated(folders: list[str], offline: dict[str, str]) -> dict[str, Any]:
    lines = [line for line in run(UPDATE, folders).splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line.removeprefix("RESULT ")) for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_updated_in_place_is_as_good_as_new(name: str, updated: dict[str, Any], offline: dict[str, str]) -> None:
    expected = {"same": True, "updated": True, "differ": True, "extras": 0, "unknown": [], "harm": []}
    assert updated[name] == {**expected, "contract": offline[name]}
