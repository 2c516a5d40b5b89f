"""Runs cases: vLLM is imported once for each target, and each case is a fork of that process."""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.engines.vllm.sweep.case import Case, Outcome
from tests.engines.vllm.sweep.small_models import NoTransformersClass

if TYPE_CHECKING:
    from torch import nn

    from probe_cli.engines.vllm.engine import VllmEngine

__all__ = ["probe_case", "run_cases"]

_SECONDS_PER_CASE = 300


def run_cases(
    cases: Sequence[Case], *, jobs: int = 1, told: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """The outcomes, in the order of the cases."""
    outcomes: dict[str, Outcome] = {}
    for target in dict.fromkeys(case.target for case in cases):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run_target(target, [case for case in cases if case.target == target], jobs, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                outcome = msgspec.json.decode(line, type=Outcome)
                outcomes[outcome.name] = outcome
                told(outcome)
        os.waitpid(pid, 0)
    return [
        outcomes.get(case.name) or Outcome(case.name, "failed", reason="its process died without a word")
        for case in cases
    ]


def _run_target(target: str, cases: Sequence[Case], jobs: int, out: int) -> None:
    try:
        from probe_cli.engines.base import EngineOptions
        from probe_cli.engines.vllm.engine import VllmEngine

        VllmEngine(EngineOptions(target=target)).warm_up()
        _import_what_many_need()
        for outcome in _forked(cases, jobs):
            os.write(out, msgspec.json.encode(outcome) + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _import_what_many_need() -> None:
    """Once here, not in every fork."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    for module in ("llama", "qwen3_moe", "deepseek_v2", "gpt_oss"):
        importlib.import_module(f"vllm.model_executor.models.{module}")


def _forked(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    waiting = list(reversed(cases))
    running: dict[int, tuple[Case, int]] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop()
                reading, writing = os.pipe()
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    _child(case, writing)
                os.close(writing)
                running[reading] = (case, pid)
                selector.register(reading, selectors.EVENT_READ)
            for key, _ in selector.select():
                data = b""
                while chunk := os.read(key.fd, 1 << 20):
                    data += chunk
                case, pid = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                if data:
                    outcome = msgspec.json.decode(data, type=Outcome)
                    if case.otherwise is not None and "load_weights" in outcome.reason:
                        waiting.append(case.otherwise)
                    else:
                        yield outcome
                else:
                    code = os.waitstatus_to_exitcode(status)
                    why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    yield Outcome(case.name, "failed", reason=f"its process died: {why}")


def _child(case: Case, out: int) -> None:
    signal.alarm(_SECONDS_PER_CASE)
    if not os.environ.get("SWEEP_VERBOSE"):
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    start = time.perf_counter()
    with contextlib.suppress(BaseException):
        outcome = probe_case(case)
        outcome.seconds = round(time.perf_counter() - start, 2)
        data = msgspec.json.encode(outcome)
        while data:
            data = data[os.write(out, data) :]
    os._exit(0)


def probe_case(case: Case) -> Outcome:
    """Make the checkpoint and probe one rank of it. Once per process."""
    from probe_cli.checkpoint import Checkpoint
    from probe_cli.engines.base import EngineOptions
    from probe_cli.engines.vllm.engine import VllmEngine
    from probe_cli.manifest import Bundle
    from probe_cli.probe.build import build_rank
    from tests.engines.vllm.sweep.reasons import why_unfed, why_unused

    outcome = Outcome(case.name, "failed", bent=case.bent)
    with tempfile.TemporaryDirectory() as folder:
        try:
            case.make(Path(folder))
        except NoTransformersClass as error:
            outcome.status, outcome.reason = "not made", f"no class {error} in transformers"
            return outcome
        except Exception as error:
            outcome.status, outcome.reason = "not made", _line(error)
            outcome.where = traceback.format_exc()
            return outcome
        try:
            checkpoint = Checkpoint.open(folder)
            options = EngineOptions(
                target=case.target,
                role=case.role,
                arguments=_in_folder(case.arguments, folder),
                trust_remote_code=case.own_code,
            )
            engine = VllmEngine(options)
            ranks = engine.ranks(checkpoint, case.topology)
            if case.spread and experts_of(engine) > 1:
                spread = msgspec.structs.replace(case.topology, ep=case.topology.tp * case.topology.dp)
                engine = VllmEngine(options)
                ranks = engine.ranks(checkpoint, spread)
            built: list[nn.Module] = []
            materialize = engine.materialize
            engine.materialize = lambda *a: built.append(materialize(*a)) or built[-1]  # type: ignore[method-assign]
            result = build_rank(engine, checkpoint, ranks[case.rank])
            outcome.topology = str(ranks[case.rank].topology)
        except Exception as error:
            outcome.reason = _line(error)
            outcome.where = traceback.format_exc()
            return outcome
        summary = result.manifest.document.summary
        outcome.model = result.manifest.document.model.class_name
        outcome.sources = len(checkpoint)
        outcome.applications = summary.applications
        outcome.declined = summary.declined
        outcome.direct = summary.direct_writes
        index = Bundle.build(checkpoint, [result.manifest], [result.unused]).index
        aside = [name for reason, names in index.unused.items() if reason != "declined" for name in names]
        used = [source.name for source in result.manifest.sources]
        outcome.unused = _folded(why_unused(aside, used, built[0], case.role))
        outcome.unfed = _folded(why_unfed(sorted(index.unfed), built[0]))
        outcome.status = "passed" if summary.applications else "failed"
        outcome.reason = "" if summary.applications else "the load wrote nothing"
    return outcome


def _folded(reasons: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    from probe_cli.manifest.patterns import fold_text

    return {reason: fold_text(names) for reason, names in reasons.items()}


def _in_folder(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace("{folder}", folder)
    if isinstance(value, Mapping):
        return {name: _in_folder(item, folder) for name, item in value.items()}
    return value


def experts_of(engine: VllmEngine) -> int:
    """How many experts vLLM sees in the model whose configuration it has made."""
    return int(engine._config.model_config.get_num_experts())


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}"
