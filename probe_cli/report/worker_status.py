"""What the workers of a serving engine say about their weights: fetched from the server or read from a folder of receipts."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from probe_cli.errors import InputError, UsageError
from probe_cli.report.plain import printable

__all__ = ["fetch_status", "is_healthy", "read_receipts", "status_lines"]

_LIMIT = 64 << 20
_NAMES_SHOWN = 20
_RECEIPT = re.compile(r"receipt-(?:(?P<role>[a-z]+)-)?rank(?P<rank>\d+)-update(?P<update>\d+)\.json")


def fetch_status(url: str, timeout: float) -> list[dict[str, Any]]:
    """One entry for each worker, from a vLLM server's `/collective_rpc` (served with VLLM_SERVER_DEV_MODE=1).

    Raises UsageError for a URL that is none, InputError if the server cannot be asked or answers something else.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no http(s) URL")
    endpoint = url.rstrip("/") + "/collective_rpc"
    request = urllib.request.Request(
        endpoint,
        data=json.dumps({"method": "probe_manifest_receipt"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read(_LIMIT)
    except urllib.error.HTTPError as error:
        hint = "start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else "is the plugin installed there?"
        raise InputError(f"{endpoint}: HTTP {error.code}", hint=hint) from None
    except (urllib.error.URLError, OSError) as error:
        raise InputError(f"{endpoint}: {getattr(error, 'reason', error)}") from None
    try:
        results = json.loads(text)["results"]
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{endpoint}: the answer is not that of a vLLM server with this plugin") from None
    if not results:
        raise InputError(f"{endpoint}: no worker answered")
    return results


def read_receipts(folder: Path) -> list[dict[str, Any]]:
    """The last receipt of each rank in a folder that `PROBE_MANIFEST_RECEIPTS` names, as entries like a server's.

    Raises InputError if there is none, or one cannot be read.
    """
    latest: dict[tuple[str, int], tuple[int, Path]] = {}
    for path in sorted(folder.glob("receipt-*.json")) if folder.is_dir() else ():
        match = _RECEIPT.fullmatch(path.name)
        if match is not None:
            key = (match["role"] or "main", int(match["rank"]))
            latest[key] = max(latest.get(key, (0, path)), (int(match["update"]), path))
    if not latest:
        raise InputError(f"{folder}: no receipts there", hint="set PROBE_MANIFEST_RECEIPTS where the engine runs")
    found: list[dict[str, Any]] = []
    for (role, rank), (_, path) in sorted(latest.items()):
        try:
            receipt = json.loads(path.read_bytes()[:_LIMIT])
            ok = bool(receipt["ok"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a receipt") from None
        state = "ready" if ok else "failed"
        found.append({"role": role, "rank": rank, "tracked": True, "state": state, "receipt": receipt})
    return found


def is_healthy(entry: Mapping[str, Any]) -> bool:
    """Tracked, not undefined, the last update (if there was one) succeeded, and nothing was loaded past it."""
    receipt = entry.get("receipt")
    fine = (
        entry.get("state") == "ready"
        and (receipt is None or bool(receipt.get("ok")))
        and not entry.get("untracked_loads")
    )
    return fine and (entry.get("draft") is None or is_healthy(entry["draft"]))


def status_lines(entries: Iterable[Mapping[str, Any]], *, verbose: bool = False) -> Iterator[str]:
    """Lines for people, a paragraph for each worker."""
    for entry in entries:
        yield from _entry_lines(entry, verbose)
        if entry.get("draft") is not None:
            yield from _entry_lines(entry["draft"], verbose)


def _entry_lines(entry: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    role = "" if entry.get("role", "main") == "main" else f" ({entry['role']} model)"
    head = f"rank {entry.get('rank', '?')}{role}: {entry.get('state', 'unknown')}"
    if entry.get("generation") is not None:
        head += f", generation {entry['generation']}"
    if entry.get("contract_digest"):
        head += f", contract {str(entry['contract_digest'])[:19]}"
    yield printable(head)
    if entry.get("reason"):
        yield printable(f"  not tracked: {entry['reason']}")
    if entry.get("untracked_loads"):
        calls = f"{entry['untracked_loads']} call" + "s" * (entry["untracked_loads"] != 1)
        yield printable(
            f"  {calls} of load_weights outside an update: weights that nothing has judged; send a full update"
        )
    receipt = entry.get("receipt")
    if not isinstance(receipt, Mapping):
        if entry.get("tracked"):
            yield "  no update yet"
        return
    yield printable(
        f"  update {receipt.get('update')} {'ok' if receipt.get('ok') else 'FAILED'}: {receipt.get('observed')} of "
        f"{receipt.get('expected')} applications, {receipt.get('bytes_published', 0) / 1e6:.1f} MB published in "
        f"{receipt.get('seconds', 0):.2f} s, {receipt.get('extras')} extras, {receipt.get('declined')} declined"
    )
    missing = list(receipt.get("missing") or ())
    for key, count in missing if verbose else missing[:_NAMES_SHOWN]:
        yield printable(f"  missing: {key}" + (f" ({count} times)" if count > 1 else ""))
    if len(missing) > _NAMES_SHOWN and not verbose:
        yield f"  and {len(missing) - _NAMES_SHOWN} more; -v shows all"
    if receipt.get("error") and not missing:
        yield printable(f"  error: {receipt['error']}")
