"""Each architecture that vLLM runs on CPUs: start on A, reload A, update to B; every tensor and token as in a cold engine on B; and
the manifest built offline is the contract recorded in the engine."""

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

QUICK = ("llama-tied", "deepseek-v3")
SLOW = ("llama", "qwen3", "mixtral", "deepseek-v2", "gemma3", "phi3", "gpt-oss")
#: vLLM 0.32 needs what transformers 5 no longer writes.
CONFIG: dict[str, dict[str, Any]] = {"deepseek-v3": {"topk_method": "noaux_tc"}}

#: An engine's groups are made for its kind of model: each model has a process of its own.
SCRIPT = """
import json, sys
from pathlib import Path
from tests.engines.vllm_serving.serving import serve

a, b, bundle = map(Path, sys.argv[1:])
found = {}
with serve(b) as cold:
    expected = cold.digests, cold.tokens()
del cold
with serve(a, str(bundle)) as served:
    found["offline"] = served.status["contract_digest"]
    first = served.digests, served.tokens()
    served.reload(weights_path=str(a))
    found["same"] = (served.digests, served.tokens()) == first
    served.reload(weights_path=str(b))
    found["updated"] = (served.digests, served.tokens()) == expected
    found["differ"] = first[1] != expected[1]
    found["extras"] = served.status["receipt"]["extras"]
    found["unknown"] = served.status["receipt"]["unknown_sources"]
    found["harm"] = [f for f in served.status["receipt"]["findings"] if f["kind"] not in ("settled", "refreshed")]
del served
with serve(a, "record") as recorded:
    found["recorded"] = recorded.status["contract_digest"]
print("RESULT", json.dumps(found))
"""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_updated_in_place_is_as_good_as_new(name: str, checkpoints: Any, tmp_path: Path) -> None:
    a, b = checkpoints(name)
    for folder in (a, b):
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **CONFIG.get(name, {})}))
    environment = {**os.environ, **ENVIRONMENT}
    bundle = tmp_path / "bundle"
    build = [sys.executable, "-m", "probe_cli", "build", str(a), "--engine", "vllm", "-o", str(bundle)]
    built = subprocess.run(build, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    command = [sys.executable, "-c", SCRIPT, str(a), str(b), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found.pop("offline") == found.pop("recorded")
    assert found == {"same": True, "updated": True, "differ": True, "extras": 0, "unknown": [], "harm": []}
