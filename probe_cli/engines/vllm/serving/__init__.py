"""The vLLM plugin: updates of serving processes, tracked by contract. `docs/serving.md` says how to use it.

vLLM calls `register` in every process of an engine (entry point group `vllm.general_plugins`). Without `PROBE_MANIFEST` nothing of
vLLM is replaced but the dummy loader's constructor, which learns two keys of its extra config.
"""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Install the plugin in this process, if it is asked for. Raises an error of this package for a setting that is wrong."""
    import vllm.version

    from probe_cli.engines.vllm.serving.log import use_logger_of_vllm
    from probe_cli.engines.vllm.serving.points import check_version
    from probe_cli.engines.vllm.serving.settings import Settings

    settings = Settings.read()
    use_logger_of_vllm()
    refusal = check_version(vllm.version.__version__)
    if refusal is not None:
        if settings.active:
            _refuse(refusal, settings.refuses)
        return

    from probe_cli.engines.vllm.serving.patches import install, install_dummy_loader

    install_dummy_loader()
    if settings.active:
        install()


def _refuse(refusal: str, stop: bool) -> None:
    from probe_cli.errors import EngineError

    if stop:
        raise EngineError(
            refusal, hint="unset PROBE_MANIFEST, or PROBE_MANIFEST_ON_MISMATCH=warn to serve without tracking"
        )
    logging.getLogger("probe_cli.vllm").warning("UPDATES ARE NOT TRACKED: %s", refusal)
