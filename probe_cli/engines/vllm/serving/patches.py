"""Put the plugin between vLLM and its models. Installed once in each process; models that are not tracked go vLLM's own way."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from probe_cli.engines.vllm.serving.answers import read_all_answers
from probe_cli.engines.vllm.serving.extra_config import ExtraConfig, take_extra_config
from probe_cli.engines.vllm.serving.guard import ask_after_call, ask_after_wake, refuse_callers, refuse_requests
from probe_cli.engines.vllm.serving.points import OWN_PLANS, POINTS, Point, resolve
from probe_cli.engines.vllm.serving.settings import Settings
from probe_cli.engines.vllm.serving.tracked import TrackedModel, tracked

__all__ = ["install", "install_dummy_loader"]

_log = logging.getLogger("probe_cli.vllm")

#: Points that have been replaced in this process.
_installed: set[str] = set()


def install() -> None:
    """Replace what tracking needs; what is to be done with a model is read when it is created. Does nothing the second time.
    Raises EngineError if vLLM lacks one of the places."""
    if "create" in _installed:
        return
    _replace("create", _create)
    _replace("process", _process)
    _replace("begin", _begin)
    _replace("finish", _finish)
    _replace("loaded", _loaded)
    _replace("worker_finish", _worker_finish)
    _replace("sleep", _sleep)
    _replace("executor", read_all_answers)
    _replace("call", ask_after_call)
    _replace("wake", ask_after_wake)
    _replace("request", refuse_requests)
    _replace("caller", refuse_callers)
    worker, _, _ = resolve(Point(POINTS["worker"].module, "WorkerBase.__init__", ""))
    worker.probe_manifest_receipt = probe_manifest_receipt
    worker.probe_manifest_digests = probe_manifest_digests
    worker.probe_manifest_undefined = probe_manifest_undefined


def install_dummy_loader() -> None:
    """Teach the dummy loader `enable_load_probe` and `load_manifest`; the rest follows when a model asks for it."""
    if "dummy" in _installed:
        return

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, load_config: Any) -> None:
            asked, rest = take_extra_config(load_config)
            original(self, rest)
            if asked is not None:
                self.probe_manifest = asked
                install()

        return init

    _replace("dummy", replacement)


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    point = POINTS[name]
    owner, attribute, original = resolve(point)
    replacement = make(original)
    _installed.add(name)
    if not point.everywhere:
        setattr(owner, attribute, replacement)
        return
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and module.__name__.startswith("vllm"):
            for key in [key for key, value in namespace.items() if value is original]:
                namespace[key] = replacement


def _create(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        settings = Settings.read()
        asked: ExtraConfig | None = getattr(bound["self"], "probe_manifest", None)
        if not settings.active and asked is None:
            return model
        config, model_config = bound["vllm_config"], bound["model_config"]
        role = "draft" if getattr(model_config, "runner_type", None) == "draft" else "main"
        TrackedModel(model, config, model_config, role, asked.settings(settings) if asked else settings)
        return model

    return create_model


def _process(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def process_weights_after_loading(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        found = tracked(model)
        if found is None:
            original(model, *args, **kwargs)
        else:
            found.process(lambda: original(model, *args, **kwargs))

    return process_weights_after_loading


def _begin(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_layerwise_reload(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        found = tracked(model)
        if found is None or found.session is None:
            original(model, *args, **kwargs)
        elif _has_own_plan(sys._getframe(1).f_globals, model):
            found.written_elsewhere = True
            original(model, *args, **kwargs)
        else:
            found.begin()

    return initialize_layerwise_reload


def _finish(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def finalize_layerwise_reload(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        found = tracked(model)
        if found is None or found.session is None:
            original(model, *args, **kwargs)
        elif _has_own_plan(sys._getframe(1).f_globals, model):
            original(model, *args, **kwargs)
            found.written_elsewhere = False
            found.session.revalidate()
        else:
            found.finish()

    return finalize_layerwise_reload


def _has_own_plan(caller: dict[str, Any], model: nn.Module) -> bool:
    name = str(caller.get("__name__", "")).rpartition(".")[2]
    if name not in OWN_PLANS:
        return False
    if name not in _told:
        _told.add(name)
        _log.warning(
            "%s writes weights by a plan of its own: its updates of %s are not tracked", name, type(model).__name__
        )
    return True


_told: set[str] = set()


def _loaded(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for found in _tracked_models(self):
            if found.role == "draft":
                found.share(self.get_model())

    return load_model


def _worker_finish(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def finish_weight_update(self: Any) -> None:
        try:
            original(self)
        except BaseException:
            # As vLLM's own `update_weights` does when a chunk fails: the next start_weight_update must find no update open.
            if getattr(self, "weight_transfer_engine", None) is not None:
                self._weight_update_active = False
                self.weight_transfer_engine.reset_weight_update_target()
            raise

    return finish_weight_update


def _sleep(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1) -> None:
        original(self, level)
        if level == 2:
            for found in _tracked_models(self):
                found.discarded()

    return sleep


def _models_of(worker: Any) -> list[nn.Module]:
    draft = getattr(worker.model_runner, "get_draft_model", None)
    found = [worker.get_model(), draft() if callable(draft) else None]
    return [model for model in found if model is not None]


def _tracked_models(worker: Any) -> list[TrackedModel]:
    return [found for model in _models_of(worker) if (found := tracked(model)) is not None]


def probe_manifest_receipt(self: Any) -> dict[str, Any]:
    """A worker's method for `collective_rpc`: what it tracks, the state of its weights, and the last receipt."""
    states = [found.status for found in _tracked_models(self)]
    if not states:
        return {"tracked": False, "reason": "PROBE_MANIFEST is not set", "state": "untracked", "generation": 0}
    return states[0] | ({"draft": states[1]} if len(states) > 1 else {})


def probe_manifest_undefined(self: Any) -> str:
    """A worker's method for `collective_rpc`: why its weights must not serve; empty if they may. A draft model does not count: the
    main model judges every token that it proposes."""
    found = tracked(self.get_model())
    return "" if found is None else found.undefined


def probe_manifest_digests(self: Any) -> dict[str, str]:
    """A worker's method for `collective_rpc`: SHA-256 of every tensor that its model's layers hold, by name. Equal for two
    engines that hold the same weights in the same form, so a cold engine shows what a reload ought to have come to."""
    from probe_cli.engines.vllm.serving.digests import live_digests

    return live_digests(self.get_model())
