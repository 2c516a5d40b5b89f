"""A model whose updates are tracked: from its cold load, through any number of updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from probe_cli.engines.vllm.serving.online import load_before_quantizing, quantized_while_loading
from probe_cli.engines.vllm.serving.probing import loading_context, probe_live
from probe_cli.engines.vllm.serving.processing import VllmProcessing
from probe_cli.engines.vllm.serving.rank import engine_identity, peers, rank_of, rank_within, replica_of
from probe_cli.engines.vllm.serving.receipts import ReceiptLog
from probe_cli.engines.vllm.serving.refusals import refusals
from probe_cli.engines.vllm.serving.settings import RECORD, Settings
from probe_cli.engines.vllm.serving.sources import NotedSources, headers_of
from probe_cli.errors import ProbeManifestError, ReloadError
from probe_cli.manifest import Manifest
from probe_cli.manifest.read import read_any
from probe_cli.reload import ColdLoad, ReloadSession, Update
from probe_cli.reload.cold import Residue
from probe_cli.reload.replaced import find_replaced
from probe_cli.reload.verify import placement

__all__ = ["TrackedModel", "tracked"]

_log = logging.getLogger("probe_cli.vllm")

_ATTRIBUTE = "_probe_manifest"
#: Seconds to wait for what other ranks have to say about an update that has failed.
_PATIENCE = 5.0


def tracked(model: object) -> TrackedModel | None:
    """What was attached to a model when it was created."""
    found = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, TrackedModel) else None


def _placement(model: nn.Module) -> dict[str, str]:
    """Where the experts are. LoRA puts layers into wrappers, which moves no expert."""
    return {path.replace(".base_layer", ""): digest for path, digest in placement(model).items()}


class TrackedModel:
    """Attached to a model when it is created; holds its session once it is loaded.

    It has slots and no `__dict__`, so that those who walk a model's attributes do not walk into it.
    """

    __slots__ = (
        "_config", "_model_config", "_online", "_original_load", "_update", "generation", "log", "model", "noted", "rank", "reason",
        "role", "session", "settings", "start_seconds", "strays", "written_elsewhere",
    )  # fmt: skip

    def __init__(self, model: nn.Module, config: Any, model_config: Any, role: str, settings: Settings) -> None:
        self.model = model
        self.rank = rank_of(config)
        self.role = role
        self.settings = settings
        self.noted = NotedSources()
        self.session: ReloadSession | None = None
        #: Why this model is not tracked; empty if it is (or not loaded yet).
        self.reason = ""
        #: Full updates that have succeeded since the start.
        self.generation = 0
        #: Calls of `load_weights` outside an update since the last full one: what they left behind, nobody has judged.
        self.strays = 0
        #: A transfer engine with a plan of its own is at work.
        self.written_elsewhere = False
        #: What tracking added to the start.
        self.start_seconds = 0.0
        self.log = ReceiptLog(settings.receipts, role, replica_of(config))
        self._config = config
        self._model_config = model_config
        self._update: Update | None = None
        if settings.online == "track":
            load_before_quantizing(model, self._device)
        self._online = next((name for name, _ in quantized_while_loading(model)), None)
        self._original_load: Callable[..., object] = model.load_weights  # type: ignore[assignment]
        model.__dict__[_ATTRIBUTE] = self
        model.__dict__["load_weights"] = self._loader()

    # The cold load

    def _loader(self) -> Callable[..., object]:
        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> object:
            return self.load(weights, *args, **kwargs)

        return load_weights

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> object:
        """Stand in for the model's `load_weights`: note the first load, track the load of an update."""
        update = self._update
        if update is not None:
            if not update.open:
                raise self._closed(update)
            with update.loading():
                return self._original_load(update.track(weights), *args, **kwargs)
        if self.session is None:
            weights = self.noted.watch(weights)
        elif not self.written_elsewhere:
            self._note_stray()
        return self._original_load(weights, *args, **kwargs)

    def process(self, process: Callable[[], None]) -> None:
        """Around the cold load's post-processing. Raises ReloadError if the model cannot be tracked, unless that is to be
        a warning."""
        if self.session is not None:
            process()
            return
        started = time.perf_counter()
        cold: ColdLoad | None = None
        try:
            self._refuse()
            manifest = self._manifest()
            cold = ColdLoad(self.model, self._processing())
            cold.loaded(manifest, every_layer=self._may_sleep)
            self._keep_on_host(cold)
        except ProbeManifestError as error:
            self._give_up(error)
        if cold is None or self.reason:
            process()
            return
        processing = time.perf_counter()
        with self._untied(), cold.processing():
            process()
        started += time.perf_counter() - processing  # vLLM's own work
        try:
            self._begin(cold, manifest)
        except ProbeManifestError as error:
            self._give_up(error)
            return
        self.start_seconds = time.perf_counter() - started
        _log.info(
            "updates of %s are tracked: %s, %d applications in %d layers, contract %s (%.2f s)",
            type(self.model).__name__, manifest.rank, manifest.document.summary.applications, len(manifest.layers),
            manifest.contract_digest[:19], self.start_seconds,
        )  # fmt: skip

    def _note_stray(self) -> None:
        if not self.strays:
            _log.warning(
                "load_weights of %s was called outside a weight update: what it writes is NOT TRACKED, nothing checks that it is "
                "complete or processes it; call start_weight_update before it and finish_weight_update after it",
                type(self.model).__name__,
            )
        self.strays += 1

    @property
    def _may_sleep(self) -> bool:
        return bool(getattr(self._model_config, "enable_sleep_mode", False))

    @staticmethod
    def _keep_on_host(cold: ColdLoad) -> None:
        # Level 2 of vLLM's sleep mode discards all device memory that was taken while the model was loaded.
        for name, residue in cold.residue.items():
            cold.residue[name] = Residue(residue.boxes, tuple(value.cpu() for value in residue.values))

    def _processing(self) -> VllmProcessing:
        return VllmProcessing(self.model, self._model_config, self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device(self._config.device_config.device)

    def _refuse(self) -> None:
        lines = list(refusals(self.model, self._config, self._model_config, self._online))
        if lines:
            raise ReloadError(f"updates of this model cannot be tracked: {'; '.join(lines)}")

    def _manifest(self) -> Manifest:
        source = self.settings.source(self.role)
        if source != RECORD:
            found = read_any(source)
            offered = found.topology if isinstance(found, Manifest) else found.index.topology
            self.rank = rank_within(offered, self._config, self._model_config)
            return found if isinstance(found, Manifest) else found.manifest(self.rank.index)
        path = self._model_config.model
        if len(self.noted):
            checkpoint = self.noted.checkpoint(path)
        else:
            checkpoint = headers_of(path, self._model_config.revision)
        return probe_live(self.model, checkpoint, self._config, self._model_config.dtype, self._original_load)

    def _begin(self, cold: ColdLoad, manifest: Manifest) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.session = ReloadSession(
            self.model,
            manifest,
            cold=cold,
            load=self._original_load,
            loading=lambda: loading_context(self._config, self._model_config.dtype),
            rank=self.rank,
            topology=self.rank.topology,
            engine=engine_identity(self._config, manifest.engine.target),
            default_loaders=(default_weight_loader,),
            staging_bytes=self.settings.staging_bytes,
            commit=self.settings.commit,  # type: ignore[arg-type]
            group=peers(self._config),
            vote_timeout=self.settings.timeout,
            audit=self.settings.audit,
            placement_of=_placement,
        )

    def _give_up(self, error: ProbeManifestError) -> None:
        if self.settings.refuses:
            raise ReloadError(
                f"{error}",
                hint=error.hint or "PROBE_MANIFEST_ON_MISMATCH=warn serves without tracking",
            ) from error
        self.reason = str(error)
        _log.warning("UPDATES OF %s ARE NOT TRACKED: %s", type(self.model).__name__, error)

    @contextmanager
    def _untied(self) -> Iterator[None]:
        # vLLM ties an output layer whose first weights happen to equal the embeddings. The next weights need not.
        config = self._model_config
        if not getattr(config, "word_embeddings_untied_by_checkpoint", False):
            yield
            return
        config.word_embeddings_untied_by_checkpoint = False
        try:
            yield
        finally:
            config.word_embeddings_untied_by_checkpoint = True

    def share(self, main: nn.Module) -> None:
        """A draft model may have been given layers of the main model: only the main model's updates write those."""
        if self.session is None:
            return
        theirs = set(main.modules())
        replaced = find_replaced(self.session.cold.layout).layers
        shared = [name for name, entry in replaced.items() if entry.is_part_of(theirs)]
        if shared:
            self.session.cede(shared)
            _log.info("%s shares %s with the model that it drafts for", type(self.model).__name__, ", ".join(shared))

    # Updates

    def begin(self) -> None:
        """Begin a full update; one that was left open is given up."""
        session = self._require_session()
        update = self._update
        if update is not None and update.open:
            update.abort("a new update was begun before this one was finished")
        self._update = None
        self._update = session.update("full")

    def finish(self) -> None:
        """End the update. Raises IncompleteUpdate that names what is missing."""
        session, update = self._require_session(), self._update
        if update is None:
            raise ReloadError("there is no update to finish; begin one first")
        try:
            if not update.open:
                raise self._closed(update)
            with loading_context(self._config, self._model_config.dtype):
                update.finish()
            self.generation += 1
            self.strays = 0
        except ProbeManifestError as error:
            # Only the text of an error leaves a worker, and only one worker's error reaches the caller.
            hint = f" ({error.hint})" if error.hint else ""
            raise type(error)("\n".join([f"{error}{hint}", *self._others(session, update)])) from error
        finally:
            self._update = None
            if session.receipt is not None:
                self.log.add(session.receipt)

    def discarded(self) -> None:
        """The device memory of the weights has been given up (sleep level 2)."""
        if self.session is not None:
            self.session.invalidate("sleep level 2 has discarded them; send a full update after waking up")
            self._update = None

    @property
    def undefined(self) -> str:
        """Why requests are to be refused; empty if they are not."""
        if self.session is None or self.settings.on_undefined == "serve":
            return ""
        return self.session.undefined_reason

    def _others(self, session: ReloadSession, update: Update) -> Iterator[str]:
        """What other ranks say was wrong with an update."""
        if session.voter is None:
            return
        subject = "publication" if session.commit == "model" else "outcome"
        try:
            ballots = session.voter.heard(update.number, subject, _PATIENCE)
        except Exception as error:  # whatever the store raises when its process is gone
            yield f"the other ranks cannot be heard: {error}"
            return
        for ballot in ballots:
            if not ballot.ok and ballot.rank != self.rank.index and "did not agree" not in ballot.reason:
                yield f"rank {ballot.rank}: {ballot.reason}"

    def _closed(self, update: Update) -> ReloadError:
        reason = update.receipt.error if update.receipt is not None else ""
        return ReloadError(f"update {update.number} has failed: {reason or 'it was aborted'}; begin a new one")

    def _require_session(self) -> ReloadSession:
        if self.session is None:
            raise ReloadError(f"updates of this model are not tracked: {self.reason or 'it is not loaded yet'}")
        return self.session

    @property
    def status(self) -> dict[str, Any]:
        """Plain values for whoever asks over the wire."""
        session = self.session
        found: dict[str, Any] = {
            "role": self.role,
            "rank": self.rank.index,
            "topology": str(self.rank.topology),
            "model": type(self.model).__name__,
            "tracked": session is not None,
            "reason": self.reason,
            "state": "untracked" if session is None else session.state,
            "generation": self.generation,
            "untracked_loads": self.strays,
            "start_seconds": round(self.start_seconds, 3),
        }
        if session is not None:
            found |= {
                "manifest_digest": session.manifest.digest,
                "contract_digest": session.manifest.contract_digest,
                "undefined_reason": session.undefined_reason,
                "receipt": None if session.receipt is None else self.log.plain(session.receipt),
            }
        return found
