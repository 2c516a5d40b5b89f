"""Manifests written by every released schema version are read by this one, and mean what they meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.json_schema import json_schema, json_schema_text
from probe_cli.manifest.schema import SCHEMA_VERSION
from probe_cli.manifest.text import render

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(p.name for p in GOLDEN.iterdir() if (p / "expected.json").exists())


def expected(version: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / version / "expected.json").read_text(encoding="utf-8"))
    return content


def test_this_version_has_golden_files() -> None:
    assert SCHEMA_VERSION in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_bundle_is_read(version: str) -> None:
    bundle = Bundle.read(GOLDEN / version / "dense-tp2")
    assert bundle.digest == expected(version)["bundle"]
    assert [m.contract_digest for m in bundle.manifests()] == expected(version)["contracts"]
    assert bundle.index.unused == {"skipped": ("model.layers.9.mtp.weight",)}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_manifest_is_read_and_rewritten_byte_for_byte(version: str) -> None:
    manifest = Manifest.read(GOLDEN / version / "everything.json")
    known = expected(version)["everything"]
    assert (manifest.digest, manifest.contract_digest) == (known["digest"], known["contract_digest"])
    assert {str(key): count for key, count in manifest.keys().items()} == known["contract"]
    assert manifest.to_bytes() == (GOLDEN / version / "everything.json").read_bytes()


def test_the_golden_manifest_uses_every_field() -> None:
    """If this fails, a field was added: raise SCHEMA_VERSION's minor and give the field a value in golden/make.py."""
    text = json.loads((GOLDEN / SCHEMA_VERSION / "everything.json").read_text(encoding="utf-8"))
    definitions = json_schema()["$defs"]
    layer = text["layers"][0]
    places = {
        "ManifestDocument": text,
        "Layer": layer,
        "TensorEntry": {**layer["tensors"][0], **layer["tensors"][1]},
        "Coverage": layer["tensors"][0]["coverage"],
        "Application": layer["applications"][0],
        "Write": {**layer["applications"][0]["writes"][0]},
        "SourceEntry": text["sources"][0],
        "CheckpointIdentity": text["checkpoint"],
        "EngineIdentity": text["engine"],
        "ModelIdentity": text["model"],
        "Summary": text["summary"],
    }
    for name, place in places.items():
        assert set(definitions[name]["properties"]) == set(place), name


def test_current_files_are_what_this_code_writes() -> None:
    manifest = Manifest.read(GOLDEN / SCHEMA_VERSION / "everything.json")
    assert render(msgspec.to_builtins(manifest.document)) == (GOLDEN / SCHEMA_VERSION / "everything.json").read_bytes()


def test_the_committed_json_schema_is_that_of_the_code() -> None:
    """Write it anew with `python -m probe_cli.manifest.json_schema > probe_cli/manifest/schema.json`."""
    committed = Path(__file__).parents[2] / "probe_cli" / "manifest" / "schema.json"
    assert committed.read_text(encoding="utf-8") == json_schema_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_files_satisfy_the_json_schema(version: str) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    bundle = Bundle.read(GOLDEN / version / "dense-tp2")
    for text in (
        (GOLDEN / version / "everything.json").read_bytes(),
        bundle.index_bytes(),
        *(manifest.to_bytes() for manifest in bundle.manifests()),
    ):
        validator.validate(json.loads(text))
    broken = json.loads(bundle.index_bytes())
    broken["ranks"][0]["digest"] = 3
    assert not validator.is_valid(broken)
