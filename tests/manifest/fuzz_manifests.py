"""Fuzz entry for the manifest reader: any bytes are a manifest that can be used, or a ManifestError of one line.

python tests/manifest/fuzz_manifests.py -max_total_time=60 tests/hostile/manifests     (needs atheris)
"""

from __future__ import annotations

import json
import sys
from typing import Any

from probe_cli.errors import ManifestError
from probe_cli.manifest import Manifest
from probe_cli.manifest.canonical import digest
from probe_cli.manifest.decode import sniff
from probe_cli.manifest.diff import diff
from probe_cli.manifest.files import decompress
from probe_cli.manifest.schema import BUNDLE_FORMAT
from probe_cli.report.diff_text import diff_text
from probe_cli.report.diff_textconv import textconv
from probe_cli.report.plain import printable
from tests.manifest.samples import dense_manifests

__all__ = ["fuzz_bytes", "fuzz_document", "main"]

_OTHER = dense_manifests()[0]


def fuzz_bytes(content: bytes) -> Manifest | None:
    """One run on the content of a file. Raises whatever is a bug."""
    try:
        data = decompress(content, "fuzz", 1 << 20) if content.startswith(b"\x1f\x8b") else content
        if sniff(data, "fuzz") == BUNDLE_FORMAT:
            return None
        manifest = Manifest.from_bytes(data, "fuzz")
    except ManifestError as error:
        message = str(error)
        assert message.startswith("fuzz: "), message
        assert printable(message) == message, message
        assert len(message) < 1000, message
        return None
    again = Manifest.from_bytes(manifest.to_bytes())
    assert (again.digest, again.keys()) == (manifest.digest, manifest.keys())
    texts = [textconv(manifest)]
    if manifest.rank.index == _OTHER.rank.index:
        texts.append(diff_text(diff(manifest, _OTHER)))
    for text in texts:
        assert all(printable(line) == line for line in text.split("\n")), text
    return manifest


def fuzz_document(document: Any) -> Manifest | None:
    """One run on a document whose digest is put right: what then is wrong with it is in the content."""
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != "digest"}
        document["digest"] = digest(document)
    return fuzz_bytes(json.dumps(document).encode())


def main() -> None:
    """Run under atheris."""
    import atheris  # type: ignore[import-not-found]

    def both(content: bytes) -> None:
        fuzz_bytes(content)
        try:
            document = json.loads(content)
            digest(document)
        except (ValueError, RecursionError, ManifestError):
            return
        fuzz_document(document)

    atheris.instrument_all()
    atheris.Setup(sys.argv, both)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
