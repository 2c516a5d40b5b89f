"""The JSON Schema of manifest and bundle files, generated from the types. `schema.json` beside this file is its
text."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from probe_cli.manifest.schema import BUNDLE_FORMAT, MANIFEST_FORMAT, SCHEMA_VERSION, BundleIndex, ManifestDocument

__all__ = ["json_schema", "json_schema_text"]


def json_schema() -> dict[str, Any]:
    """A draft 2020-12 schema that accepts the manifest of a rank or the index of a bundle, of this major version."""
    (rank, index), definitions = msgspec.json.schema_components(
        [ManifestDocument, BundleIndex], ref_template="#/$defs/{name}"
    )
    major = SCHEMA_VERSION.partition(".")[0]
    for name, value in (("ManifestDocument", MANIFEST_FORMAT), ("BundleIndex", BUNDLE_FORMAT)):
        properties = definitions[name]["properties"]
        properties["format"] = {"const": value}
        properties["version"] = {"type": "string", "pattern": rf"^{major}\.[0-9]+$"}
        digests = {"digest", "contract_digest"}.intersection(properties)
        definitions[name]["required"] = sorted({*definitions[name]["required"], *digests})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"probe-manifest files, schema version {SCHEMA_VERSION}",
        "oneOf": [rank, index],
        "$defs": {name: _tidy(definitions[name]) for name in sorted(definitions)},
    }


def json_schema_text() -> str:
    """The schema as it stands in `schema.json`."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def _tidy(value: Any) -> Any:
    """Descriptions on one line: docstrings are wrapped for the source file."""
    if isinstance(value, dict):
        return {key: _member(key, item) for key, item in value.items()}
    return [_tidy(item) for item in value] if isinstance(value, list) else value


def _member(key: str, item: Any) -> Any:
    if key == "description" and isinstance(item, str):
        return " ".join(item.split())
    if key == "anyOf" and isinstance(item, list):
        # In an order that depends on msgspec's version, and means nothing.
        return sorted(map(_tidy, item), key=lambda alternative: json.dumps(alternative, sort_keys=True))
    return _tidy(item)


if __name__ == "__main__":
    print(json_schema_text(), end="")
