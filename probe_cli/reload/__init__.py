"""The runtime: a live model takes an update, tracked by contract, layer by layer, and ends with a receipt or an error
by name."""

from __future__ import annotations

from probe_cli.reload.arena import Arena, Spec
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.processing import DefaultProcessing, Processing
from probe_cli.reload.receipt import Ballot, Finding, LayerReceipt, Receipt
from probe_cli.reload.record import Recording, record
from probe_cli.reload.scope import Scope
from probe_cli.reload.session import ReloadSession
from probe_cli.reload.update import Update

__all__ = [
    "Arena",
    "Ballot",
    "ColdLoad",
    "DefaultProcessing",
    "Finding",
    "LayerReceipt",
    "Processing",
    "Receipt",
    "Recording",
    "ReloadSession",
    "Scope",
    "Spec",
    "Update",
    "record",
]
