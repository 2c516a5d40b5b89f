"""The engine of your own code: `--engine python:package.module:factory`, or `python:path/to/file.py:factory`.

The factory is called as `factory(config, rank, **arguments)`: `config` is config.json (or None), `rank` a
`probe_cli.Rank`, `arguments` what `--arg` gave. It returns an `nn.Module` with `load_weights(iterable of (name,
tensor))`. This runs code that the user names, and says so; it never runs code that comes with a model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.errors import EngineError, ProbeManifestError, UsageError, described
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.probe.live import LiveEngine, torch_version
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.topology import Rank, Topology

__all__ = ["PythonEngine", "create"]

logger = logging.getLogger(__name__)


def create(options: EngineOptions) -> PythonEngine:
    """The entry point of the engine `python`."""
    return PythonEngine(options)


class PythonEngine(LiveEngine):
    """See the module docstring.

    Two names are read from the factory's module if it has them: `default_loaders` (functions that load parameters that
    have no loader of their own) and `control_flags` (names of loader arguments that select nothing).
    """

    def __init__(self, options: EngineOptions) -> None:
        home, _, name = options.reference.rpartition(":")
        if not home or not name or (home.startswith(".") and not _is_file(home)):
            raise UsageError(
                f"--engine python:{options.reference}: expected python:package.module:factory or "
                "python:path/to/file.py:factory"
            )
        if options.target not in ("auto", "cpu"):
            raise UsageError(
                f"--target {options.target} means nothing to --engine python: your factory decides the layout"
            )
        self._home = home
        self._name = name
        self._arguments = dict(options.arguments)
        self._module: ModuleType | None = None
        super().__init__(
            EngineIdentity(
                name="python",
                version=_digest(home),
                torch=torch_version(),
                target="cpu",
                arguments={"factory": f"{Path(home).name if _is_file(home) else home}:{name}", **self._arguments},
            )
        )

    def warm_up(self) -> None:
        """Import the module of the factory, once."""
        self._factory()

    def ranks(self, checkpoint: Checkpoint, topology: Topology) -> Sequence[Rank]:
        return topology.ranks()

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        factory = self._factory()
        config = None if checkpoint.config is None else dict(checkpoint.config)
        self._check_arguments(factory)
        try:
            with MetaMaterializer():
                model = factory(config, rank, **self._arguments)
        except ProbeManifestError:
            raise
        except Exception as error:
            raise EngineError(f"{self._home}:{self._name} failed for {rank}: {described(error)}") from error
        if not isinstance(model, nn.Module):
            raise EngineError(f"{self._home}:{self._name} returned a {type(model).__name__}, not an nn.Module")
        if not callable(getattr(model, "load_weights", None)):
            raise EngineError(
                f"{self._home}:{self._name} returned a {type(model).__name__} without load_weights",
                hint="the model needs load_weights(iterable of (name, tensor))",
            )
        return model

    @property
    def control_flags(self) -> frozenset[str]:
        own = getattr(self._module, "control_flags", ()) if self._module is not None else ()
        return super().control_flags | frozenset(own)

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        own = getattr(self._module, "default_loaders", ()) if self._module is not None else ()
        return tuple(own)

    def _factory(self) -> Callable[..., Any]:
        if self._module is None:
            logger.warning("running your own code: %s:%s", self._home, self._name)
            self._module = _import(self._home)
        factory = getattr(self._module, self._name, None)
        if not callable(factory):
            what = "is not callable" if factory is not None else "does not exist"
            raise UsageError(f"--engine python: {self._name} {what} in {self._home}")
        found: Callable[..., Any] = factory
        return found

    def _check_arguments(self, factory: Callable[..., Any]) -> None:
        try:
            inspect.signature(factory).bind(None, None, **self._arguments)
        except TypeError as error:
            raise UsageError(
                f"{self._home}:{self._name} cannot be called as factory(config, rank"
                f"{''.join(f', {name}=...' for name in self._arguments)}): {error}"
            ) from None
        except ValueError:  # no signature to be had: the call will tell
            return


def _is_file(home: str) -> bool:
    return home.endswith(".py") or "/" in home


def _digest(home: str) -> str:
    """What changes when the code does: the hash of a file; "0" for a module, whose package has a version of its own."""
    if not _is_file(home):
        return "0"
    try:
        return hashlib.sha256(Path(home).read_bytes()).hexdigest()[:12]
    except OSError:
        raise UsageError(f"--engine python: there is no file {home}") from None


def _import(home: str) -> ModuleType:
    try:
        if not _is_file(home):
            if "" not in sys.path:  # a module beside the user, as with `python -m`
                sys.path.insert(0, "")
            return importlib.import_module(home)
        name = Path(home).stem
        spec = importlib.util.spec_from_file_location(name, home)
        if spec is None or spec.loader is None:
            raise UsageError(f"--engine python: {home} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickling look a module up by its name.
        sys.modules.setdefault(name, module)
        spec.loader.exec_module(module)
        return module
    except ProbeManifestError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (home == error.name or home.startswith(error.name + ".")):
            raise UsageError(
                f"--engine python: there is no module {home}", hint="install it, or run from the folder that holds it"
            ) from None
        raise EngineError(f"--engine python: {home} cannot be imported: {described(error)}") from error
    except (Exception, SystemExit) as error:  # a script that ends when it is done must not end this command
        raise EngineError(f"--engine python: {home} cannot be imported: {described(error)}") from error
