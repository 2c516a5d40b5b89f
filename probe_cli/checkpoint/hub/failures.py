"""What can go wrong between us and the Hub, as one line each, and what is worth another try."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from typing import Any

from probe_cli.checkpoint.text import quote
from probe_cli.errors import CheckpointError

__all__ = ["BadAnswer", "explain", "is_client_error", "is_refusal", "is_worth_retrying", "wait_asked_for"]

_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
#: `RateLimit: "api";r=0;t=55`, as the Hub sends it beside or instead of Retry-After.
_RATE_LIMIT = re.compile(r";\s*t\s*=\s*([0-9]{1,6})")


class BadAnswer(Exception):
    """The server answered, but not what was asked for: cut, of another length, of another file."""


def _hub_errors() -> Any:
    from huggingface_hub import errors

    return errors


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_client_error(error: BaseException) -> bool:
    """True for what huggingface_hub and its HTTP library raise for a request that failed; anything else is a bug."""
    # ValueError: an answer that is not JSON. InvalidURL: a malformed HF_ENDPOINT, derived from Exception itself.
    known = (BadAnswer, OSError, ValueError, getattr(_hub_errors(), "HTTPError", OSError))
    return isinstance(error, known) or type(error).__name__ == "InvalidURL"


def is_refusal(error: BaseException) -> bool:
    """True if the server understood the request and refused it: a signed address may have expired."""
    return _status(error) in (400, 401, 403, 404, 410)


def is_worth_retrying(error: BaseException) -> bool:
    """True if the same request may succeed in a moment: server errors, rate limits, cut answers, lost connections."""
    errors = _hub_errors()
    if isinstance(error, (errors.OfflineModeIsEnabled, UnicodeEncodeError)):
        return False
    status = _status(error)
    if status is not None:
        return status in _RETRIED_STATUS
    return type(error).__name__ not in ("InvalidURL", "UnsupportedProtocol")


def wait_asked_for(error: BaseException) -> float | None:
    """Seconds that the server asked to wait, by Retry-After (seconds or a date) or RateLimit."""
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text[:9])
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            return None
    if _status(error) == 429:
        found = _RATE_LIMIT.search(headers.get("ratelimit", ""))
        return float(found.group(1)) if found else None
    return None


def explain(error: BaseException, where: str, endpoint: str, *, tries: int = 1) -> CheckpointError:
    """The one line for a failed request. `where` is the repository or file, as the user would write it."""
    errors = _hub_errors()
    status = _status(error)
    repo = where.removeprefix("hf://").partition("@")[0]
    after = f" after {tries} tries" if tries > 1 else ""
    message, hint = f"{_cause(error)}{after}", "try again later"
    if isinstance(error, errors.OfflineModeIsEnabled):
        message, hint = "is not in the cache, and HF_HUB_OFFLINE is set", "run once online, or unset HF_HUB_OFFLINE"
    elif isinstance(error, errors.GatedRepoError):
        message = f"is gated: the Hub refused access ({status})"
        hint = f"accept the conditions at {endpoint}/{repo}, then log in with `hf auth login` or set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = f"no such repository at {endpoint}, or it is private"
        hint = "check the name; for a private repository log in with `hf auth login` or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        message, hint = "no such revision, expected a branch, tag or commit hash", "list them with `hf repos refs`"
    elif isinstance(error, errors.DisabledRepoError):
        message, hint = "is disabled by the Hub", f"see {endpoint}/{repo}"
    elif isinstance(error, UnicodeEncodeError):  # of all that goes into a request, the token alone is sent as it is
        message, hint = "the token has characters that no token has", "correct HF_TOKEN, or log in with `hf auth login`"
    elif status == 401:
        message, hint = "the Hub refused the token (401)", "log in again with `hf auth login`, or correct HF_TOKEN"
    elif status == 403:
        message, hint = "the Hub forbids access (403)", "check the rights of the token in HF_TOKEN"
    elif status == 404:
        message, hint = "no such file in the repository (404)", "index and repository disagree: report it to its owner"
    elif status == 429:
        wait = wait_asked_for(error)
        message = f"rate-limited by the Hub (429){after}"
        hint = f"try again in {wait:.0f} seconds" if wait else "try again later"
        hint += "; with HF_TOKEN set the limit is higher"
    elif status is not None:
        message = f"the Hub answered with status {status}{after}"
    elif isinstance(error, BadAnswer):
        hint = "a proxy may alter the answers; try again, or set HF_ENDPOINT to another mirror"
    elif type(error).__name__ == "RemoteProtocolError":
        message = f"the answer of {endpoint} broke off: {_cause(error)}{after}"
    elif isinstance(error, (OSError, getattr(errors, "HTTPError", OSError))):
        message = f"cannot reach {endpoint}: {_cause(error)}{after}"
        hint = "check the network, HTTPS_PROXY and HF_ENDPOINT; with HF_HUB_OFFLINE=1 the cache alone is used"
    else:
        message = f"{endpoint} answered with something that is not the Hub's API: {_cause(error)}"
        hint = "check HF_ENDPOINT"
    return CheckpointError(f"{where}: {message}", hint=hint)


def _cause(error: BaseException) -> str:
    if isinstance(error, BadAnswer):
        return str(error)
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if text.isprintable() and len(text) <= 200 else quote(text)
