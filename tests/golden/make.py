"""Write the golden manifests of the current schema version. Those of released versions are never written again.

Run from the repository: `python tests/golden/make.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from probe_cli.manifest import Manifest
from probe_cli.manifest.schema import (
    SCHEMA_VERSION,
    Application,
    CheckpointIdentity,
    Coverage,
    EngineIdentity,
    FileIdentity,
    Layer,
    SourceEntry,
    TensorEntry,
    View,
    Write,
)
from probe_cli.topology import Topology
from tests.manifest.samples import MODEL, dense_bundle, summary

FOLDER = Path(__file__).parent / SCHEMA_VERSION


def everything() -> Manifest:
    """A manifest in which every field of the schema has a value that is not its default."""
    topology = Topology(tp=2, pp=2, ep=4, dp=2)
    layers = (
        Layer(
            "",
            "Model",
            (
                TensorEntry(
                    "w",
                    "BF16",
                    (4, 2),
                    alias="w",
                    coverage=Coverage(2, (((3, 4), (0, 2)),), 1, (((0, 1), (0, 1)),), False),
                ),
                TensorEntry("tied", "BF16", (2, 2), (1, 2), "buffer", False, "w", 4),
            ),
            (
                Application(
                    ("a.weight", "ü.weight"),
                    "w",
                    {
                        "shard_id": "q",
                        "expert_id": 3,
                        "part": {"enum": "Part.LEFT"},
                        "to": {"dtype": "bfloat16"},
                        "x": [1, 0.5],
                    },
                    count=2,
                    direct=True,
                    attribution="stream",
                    writes=(
                        Write(1, View(0, (2, 2), (2, 1)), View(2, (2, 2), (2, 1)), "tied", "U8", "I8", True, False, True),
                        Write(source=None),
                    ),
                ),
            ),
        ),
    )
    return Manifest.build(
        engine=EngineIdentity("sample", "1.2", "2.13.0", "cuda:sm90", True, {"dtype": "bfloat16"}),
        topology=topology,
        rank=topology.rank(5),
        model=MODEL,
        checkpoint=CheckpointIdentity(
            digest="sha256:" + "c" * 64,
            sources=2,
            nbytes=24,
            kind="wire",
            revision="0" * 40,
            repo_id="org/name",
            files=(FileIdentity("model.safetensors", 4096, "sha256:" + "d" * 64),),
        ),
        sources=[SourceEntry("a.weight", "BF16", (2, 4), 0), SourceEntry("ü.weight", "F32", ())],
        layers=layers,
        summary=summary(layers, 2, declined=1, direct_writes=2, computed=3, gaps=4, overlaps=5, unfed=6, bytes_read=7),
    )


def main() -> None:
    bundle = dense_bundle()
    bundle.write(FOLDER / "dense-tp2")
    manifest = everything()
    manifest.write(FOLDER / "everything.json")
    contract = {str(key): count for key, count in sorted(manifest.keys().items())}
    expected = {
        "bundle": bundle.digest,
        "contracts": [m.contract_digest for m in bundle.manifests()],
        "everything": {"digest": manifest.digest, "contract_digest": manifest.contract_digest, "contract": contract},
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
