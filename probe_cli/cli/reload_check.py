"""`probe-manifest reload-check`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from probe_cli.cli.inputs import engine_from, engine_options, open_checkpoint, parse_arguments
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import TopologyCommand, format_option, output_option, topology_of, topology_options
from probe_cli.errors import UsageError
from probe_cli.report.console import Console
from probe_cli.report.plain import printable

__all__ = ["command"]

EXAMPLES = """
probe-manifest reload-check checkpoint/
probe-manifest reload-check checkpoint-a/ checkpoint-b/ --tp 2 --ep --rank 1 --order random:7 --chunks 5
probe-manifest reload-check checkpoint/ --drop model.layers.0.self_attn.k_proj.weight
probe-manifest reload-check checkpoint/ --engine python:my_package.models:create --commit model --format json
"""


class _ReloadCheck(TopologyCommand, PlainCommand):
    pass


@click.command("reload-check", cls=_ReloadCheck, examples=EXAMPLES)
@click.argument("checkpoint")
@click.argument("update", required=False)
@engine_options
@topology_options
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, metavar="R", help="The rank to try.")
@click.option(
    "--manifest", metavar="MANIFEST", help="A manifest or bundle to try; by default the one that a dry run gives."
)
@click.option("--order", default="file", show_default=True, help="Order of arrival: file, reversed or random:SEED.")
@click.option("--chunks", type=click.IntRange(1), default=1, show_default=True, help="Pieces the update comes in.")
@click.option("--drop", multiple=True, metavar="SOURCE", help="A source that never arrives. May be repeated.")
@click.option("--double", multiple=True, metavar="SOURCE", help="A source that arrives twice. May be repeated.")
@click.option(
    "--commit",
    type=click.Choice(["layer", "model"]),
    default="layer",
    show_default=True,
    help="Publish each layer when it is complete, or all of them at the end or none.",
)
@click.option("--in-place", is_flag=True, help="Load straight into live tensors where nothing stands between.")
@click.option(
    "--staging-bytes", type=click.IntRange(0), metavar="N", help="Staging memory; by default twice the largest layer."
)
@click.option("--device", default="cpu", show_default=True, help="Where the model lives: cpu, cuda, cuda:1.")
@format_option("text", "json")
@output_option
@click.pass_obj
def command(
    console: Console,
    /,
    checkpoint: str,
    update: str | None,
    rank: int,
    manifest: str | None,
    order: str,
    chunks: int,
    drop: tuple[str, ...],
    double: tuple[str, ...],
    commit: str,
    in_place: bool,
    staging_bytes: int | None,
    device: str,
    output_format: str,
    output: str | None,
    tp: int | None,
    pp: int | None,
    ep: int | str | None,
    dp: int | None,
    enable_ep: bool,
    engine: str | None,
    arguments: tuple[str, ...],
    **allowed: Any,
) -> int:
    """Load CHECKPOINT into a real model, update it to UPDATE through its manifest, and compare every tensor, bit for
    bit, with a cold load of UPDATE.

    Without UPDATE, CHECKPOINT with every sign flipped is sent. For the embedded family and `python:` models.
    """
    from probe_cli.manifest import Manifest
    from probe_cli.probe import probe
    from probe_cli.reload.trial import TrialOptions, negated, read_tensor, run_trial

    console.send_to(output)
    _check_device(device)
    topology = topology_of(tp, pp, ep, dp, enable_ep)
    place = topology.rank(rank)
    source = open_checkpoint(console, checkpoint, wire=None, order="engine", revision=None)
    other = None if update is None else open_checkpoint(console, update, wire=None, order="engine", revision=None)
    made = engine_from(console, source, engine=engine, arguments=parse_arguments(arguments), **allowed)
    if made.identity.name not in ("embedded", "python"):
        raise UsageError(
            f"reload-check builds its model itself, which engine {made.identity.name} does not allow",
            hint="record or load the manifest inside the engine instead; see docs/serving.md",
        )
    made.ranks(source, topology)
    source = made.ordered(source)
    lacking = [s.name for one in (source, other) if one is not None for s in one.sources if not one.has_data(s)]
    if lacking:
        raise UsageError(f"{lacking[0]} and {len(lacking) - 1} more sources have no data here; a reload needs weights")
    found = (
        Manifest.read(manifest, rank)
        if manifest is not None
        else probe(made.materialize(source, place), source, rank=place, engine=made)
    )
    sent = source if other is None else made.ordered(other)
    trial = run_trial(
        lambda: made.materialize(source, place),
        made,
        found,
        sent.sources,
        lambda s: read_tensor(source, source[s.name], device),
        lambda s: negated(read_tensor(source, s, device)) if other is None else read_tensor(sent, s, device),
        TrialOptions(order, chunks, drop, double, commit, in_place, staging_bytes, device),
    )
    if output_format == "json":
        console.json({"ok": trial.ok, **msgspec.to_builtins(trial)})
        return 0 if trial.ok else 1
    console.print(trial.receipt.line())
    if trial.error:
        console.print(printable(trial.error))
        console.print(f"session: {trial.state}")
    for finding in trial.receipt.findings:
        console.print(printable(f"audit: {finding}"))
    what = "what they were before the update" if trial.error else "those of a cold load"
    if trial.state == "undefined":
        console.print("the model is a mixture of old and new weights; only a full update repairs it")
    else:
        equal = trial.tensors - len(trial.differing)
        console.print(f"{equal} of {trial.tensors} tensors equal {what}, bit for bit; {len(trial.moved)} moved")
        for name in trial.differing[:20]:
            console.print(printable(f"  differs: {name}"))
    if trial.hint:
        console.hint(trial.hint)
    return 0 if trial.ok else 1


def _check_device(name: str) -> None:
    """Raise UsageError unless there is such a device here."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: not a device; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: a model cannot be reloaded there; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: there is no such device here", hint="--device cpu needs none")
