"""`probe-manifest doctor`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from probe_cli._version import __version__
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.report.console import Console

if TYPE_CHECKING:
    from probe_cli.engines.vllm.doctor import VllmHealth

__all__ = ["command"]

EXAMPLES = """
probe-manifest doctor
probe-manifest doctor --engine vllm --try h100
probe-manifest doctor --format json
"""


@click.command("doctor", cls=PlainCommand, examples=EXAMPLES)
@click.option("--engine", metavar="NAME", help="This engine must be usable: exit code 1 if it is not.")
@click.option(
    "--try",
    "tried",
    metavar="TARGET",
    multiple=True,
    help="Import vLLM for this target, in a process of its own, and say how long it took. Can be repeated.",
)
@format_option("text", "json")
@output_option
@click.pass_obj
def command(
    console: Console, engine: str | None, tried: tuple[str, ...], output_format: str, output: str | None
) -> int:
    """Which engines, versions, targets and emulations are usable here, and what is missing?

    Nothing heavy is imported, unless --try asks for it.
    """
    from probe_cli.engines.registry import engine_names
    from probe_cli.engines.vllm.doctor import examine
    from probe_cli.errors import UsageError

    names = engine_names()
    if engine is not None and engine not in names:
        raise UsageError(f"no engine {engine!r}; there are {', '.join(names)}")
    console.send_to(output)
    vllm = examine()
    torch = _version_of("torch")
    usable = {name: vllm.usable if name == "vllm" else torch is not None for name in names}
    trials = [_trial(target) for target in tried]
    if output_format == "json":
        console.json(_as_json(torch, usable, vllm, trials))
    else:
        console.print("\n".join(_as_text(torch, usable, vllm, trials)))
    failed = engine is not None and not usable[engine]
    return 1 if failed or any(trial["error"] for trial in trials) else 0


def _trial(target: str) -> dict[str, Any]:
    from probe_cli.engines.vllm.doctor import try_target
    from probe_cli.errors import EngineError

    try:
        return {"target": target, "seconds": round(try_target(target), 1), "error": None}
    except EngineError as error:
        return {"target": target, "seconds": None, "error": str(error)}


def _as_json(
    torch: str | None, usable: dict[str, bool], vllm: VllmHealth, trials: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "system": f"{platform.system()} {platform.machine()}",
        "engines": [{"name": name, "usable": value} for name, value in usable.items()],
        "vllm": asdict(vllm),
        "tried": trials,
    }


def _as_text(torch: str | None, usable: dict[str, bool], vllm: VllmHealth, trials: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"probe-manifest {__version__}, Python {platform.python_version()}, torch {torch or 'not installed'}, "
        f"{platform.system()} {platform.machine()}",
        "",
    ]
    size = max(map(len, usable))
    for name, fine in usable.items():
        lines.append(f"{name:{size}}  {'usable' if fine else 'not usable'}{_about(name, vllm)}")
    lines.append("")
    for how, title in (
        ("real", "targets of vllm"),
        ("emulated", "targets of vllm, emulated (no device is needed)"),
        ("no", "not here"),
    ):
        found = [target for target in vllm.targets if target.how == how]
        reasons = dict.fromkeys(target.why for target in found)
        for why in reasons:
            named = ", ".join(target.name for target in found if target.why == why)
            lines.append(f"{title}: {named}{f' ({why})' if why else ''}")
    if vllm.build == "cuda" and not vllm.driver:
        lines.append("driver: libcuda.so.1 is not installed; an empty stand-in is loaded for builds")
    for trial in trials:
        lines.append(trial["error"] or f"tried {trial['target']}: vLLM imported in {trial['seconds']} s")
    lines += [f"missing: {line}" for line in vllm.missing]
    return lines


def _about(name: str, vllm: VllmHealth) -> str:
    if name == "vllm" and vllm.version is not None:
        return f"  vLLM {vllm.version}, {str(vllm.build).upper()} build{'' if vllm.supported else ', not supported'}"
    return {"embedded": "  llama, qwen3, qwen3_moe in plain PyTorch", "python": "  your own code"}.get(name, "")


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
