"""The errors a user can cause or meet, each one line and each with the exit code that the command ends with.

The library raises them; only the command line catches them (`probe_cli.cli.main`). Exit codes: 1 the check found
differences, 2 usage or bad input, 3 the engine failed.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "EngineError",
    "IncompleteUpdate",
    "InputError",
    "ManifestError",
    "ProbeError",
    "ProbeManifestError",
    "ReloadError",
    "UsageError",
    "described",
    "one_line",
]


class ProbeManifestError(Exception):
    """Base of all errors of this package. `str(error)` is one clear line: what, where, what was expected.

    `hint` is what to do about it; the command prints it on a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(ProbeManifestError):
    """The flags or arguments do not fit together, or name something that does not exist."""


class InputError(ProbeManifestError):
    """An input file is malformed, truncated, missing or hostile."""


class CheckpointError(InputError):
    """A checkpoint (safetensors header, index, wire file) cannot be used."""


class ManifestError(InputError):
    """A manifest or bundle cannot be used."""


class EngineError(ProbeManifestError):
    """The engine, or the model it builds, failed."""

    exit_code = 3


class ProbeError(EngineError):
    """The dry run saw something that cannot be expressed as a contract."""


class ReloadError(ProbeManifestError):
    """A reload cannot go on: wrong manifest, wrong state, failed loader."""

    exit_code = 3


class IncompleteUpdate(ReloadError):
    """An update ended without fulfilling its contracts. The missing keys are in the message, grouped by layer."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """What an error says, on one line; empty if it says nothing."""
    return " ".join(str(error).split())


def described(error: BaseException) -> str:
    """An error's class and what it says, on one line."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
