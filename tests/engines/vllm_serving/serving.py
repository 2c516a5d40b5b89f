"""Real engines in this process, one after the other: started with the plugin or without, asked for tokens and for digests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Served", "serve"]

#: Read by vLLM when it is imported or makes its configuration.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

PROMPTS = [list(range(5, 21)), list(range(100, 130))]


class Served:
    """One engine. `calls` are answered by its workers."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            **{
                "enforce_eager": True,
                "max_model_len": 128,
                "max_num_seqs": 4,
                "skip_tokenizer_init": True,
                "seed": 0,
                "disable_log_stats": True,
                **arguments,
            },
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What every worker returns."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)

    def reload(self, **kwargs: Any) -> None:
        self.call("reload_weights", **kwargs)

    @property
    def digests(self) -> dict[str, str]:
        from probe_cli.engines.vllm.serving.digests import live_digests

        return live_digests(self.worker.get_model())

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("probe_manifest_receipt")[0]
        return found

    def tokens(self) -> tuple[list[list[int]], list[float]]:
        """Greedy tokens and their cumulative log-probabilities."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0, max_tokens=16, logprobs=1, detokenize=False),
            use_tqdm=False,
        )
        self.llm.reset_prefix_cache()
        return (
            [list(output.outputs[0].token_ids) for output in outputs],
            [output.outputs[0].cumulative_logprob for output in outputs],
        )


@contextmanager
def serve(
    folder: Path, manifest: str | None = None, *, env: dict[str, str] | None = None, **arguments: Any
) -> Iterator[Served]:
    """An engine on a checkpoint; `manifest` is what `PROBE_MANIFEST` says."""
    from probe_cli.engines.vllm.serving.patches import install, install_dummy_loader

    wanted = {**({"PROBE_MANIFEST": manifest} if manifest else {}), **(env or {})}
    for name in [name for name in os.environ if name.startswith("PROBE_MANIFEST")]:
        del os.environ[name]
    os.environ.update(wanted)
    install()
    install_dummy_loader()
    served = None
    try:
        served = Served(folder, **arguments)
        yield served
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        served = None
        gc.collect()
