"""An engine upgrade that changed routing: the same checkpoint, built again, asks for something else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest.check import CheckReport, check
from probe_cli.manifest.check_config import CheckConfig
from probe_cli.manifest.check_reprobe import compare_rebuilt, engine_spec
from probe_cli.manifest.schema import EngineIdentity
from tests.manifest import corpus
from tests.manifest.test_diff import CHANGES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(corpus.write(tmp_path_factory.mktemp("original"), corpus.tensors()))


def reprobed(checkpoint: Checkpoint, kind: str | None) -> CheckReport:
    newer = {"engine": msgspec.structs.replace(corpus.ENGINE, version="2.0")}
    change = {} if kind is None else {"change": CHANGES[kind]}
    rebuilt = corpus.bundle(checkpoint, corpus.manifests(checkpoint, **change, **newer))  # type: ignore[arg-type]
    config = CheckConfig().with_flags(ignore=["PM105"])
    return check(
        [corpus.bundle(checkpoint)],
        checkpoint,
        config=config,
        reprobe=lambda origin, _: compare_rebuilt(origin, rebuilt),
    )


def test_a_newer_engine_with_the_same_contract_is_clean(checkpoint: Checkpoint) -> None:
    assert reprobed(checkpoint, None).all_findings() == ()


@pytest.mark.parametrize("kind", ["selectors-changed", "regions-changed", "count-changed", "layer-renamed"])
def test_a_changed_contract_is_an_error_that_names_it(kind: str, checkpoint: Checkpoint) -> None:
    report = reprobed(checkpoint, kind)
    (finding,) = [f for f in report.all_findings() if f.what.startswith(kind.replace("-", " "))]
    assert (finding.code, finding.ranks, report.exit_code) == ("PM401", (0, 1), 1)
    assert finding.subject.startswith("model.layers.0.")
    assert finding.layers[0].startswith("model.layers.0.")


def test_a_change_beside_the_contract_is_a_warning(checkpoint: Checkpoint) -> None:
    report = reprobed(checkpoint, "coverage-changed")
    assert {(f.code, f.severity) for f in report.all_findings()} == {("PM402", "warning")}
    assert report.exit_code == 0


def test_the_engine_is_called_as_it_was(tmp_path: Path) -> None:
    recorded = EngineIdentity("python", "x", "2.13", arguments={"factory": "package.models:create", "layers": 2})
    assert engine_spec(recorded) == ("python:package.models:create", {"layers": 2}, "main")
    assert engine_spec(EngineIdentity("vllm", "0.33", "2.13")) == ("vllm", {}, "main")

    draft = EngineIdentity("vllm", "0.33", "2.14", arguments={"role": "draft", "speculative_config": {"method": "mtp"}})
    assert engine_spec(draft) == ("vllm", {"speculative_config": {"method": "mtp"}}, "draft")
    own = EngineIdentity("python", "", "2.13", arguments={"factory": "a.b:c", "role": "draft"})
    assert engine_spec(own) == ("python:a.b:c", {"role": "draft"}, "main")
