"""Where receipts go: one line in the log (the runtime writes it), a file each if a folder is given, plain values over the wire."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from probe_cli.errors import ManifestError
from probe_cli.manifest.files import write_bytes
from probe_cli.reload import Receipt

__all__ = ["ReceiptLog"]

_log = logging.getLogger("probe_cli.vllm")


class ReceiptLog:
    """Files are named `receipt-rank0-update1.json`; those of a draft model `receipt-draft-rank0-update1.json`, those of a second
    data parallel replica `receipt-dp1-rank0-update1.json`."""

    def __init__(self, folder: Path | None, role: str, replica: int = 0) -> None:
        self._folder = folder
        self._prefix = f"receipt-{f'dp{replica}-' if replica else ''}{f'{role}-' if role != 'main' else ''}"

    def add(self, receipt: Receipt) -> None:
        """Write the file, if files are wanted. A folder that cannot be written to is told of, and harms no update."""
        if self._folder is None:
            return
        path = self._folder / f"{self._prefix}rank{receipt.rank}-update{receipt.update}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, receipt.to_json())
        except (OSError, ManifestError) as error:
            _log.warning("%s: receipt not written: %s", path, error)

    @staticmethod
    def plain(receipt: Receipt) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(receipt)
        return values
