"""Run the sweep (all of it, or the cases whose names contain one of the arguments) and write its results as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from tests.engines.vllm.sweep.case import Case, Outcome
from tests.engines.vllm.sweep.cases import architecture_cases, registered_names, special_cases
from tests.engines.vllm.sweep.runner import run_cases

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--special", action="store_true", help="quantizations and topologies only")
    parser.add_argument("--architectures", action="store_true", help="architectures only")
    parser.add_argument("--json", type=Path, help="where to write all outcomes")
    parser.add_argument("--update", type=Path, help="outcomes of an earlier run, which those of this one replace")
    parser.add_argument("--docs", type=Path, help="where to write the table (docs/coverage.md)")
    options = parser.parse_args()
    cases: list[Case] = [] if options.architectures else special_cases()
    if not options.special:
        cases = [*architecture_cases(registered_names()), *cases]
    if options.names:
        cases = [case for case in cases if any(name in case.name for name in options.names)]
    start = time.perf_counter()
    outcomes = run_cases(cases, jobs=options.jobs, told=_tell)
    made = [outcome for outcome in outcomes if outcome.status != "not made"]
    passed = [outcome for outcome in made if outcome.status == "passed"]
    seconds = time.perf_counter() - start
    print(f"{len(passed)} of {len(made)} passed, {len(outcomes) - len(made)} not made, {seconds:.0f} s")
    if options.update:
        earlier = msgspec.json.decode(options.update.read_bytes(), type=list[Outcome])
        now = {outcome.name: outcome for outcome in outcomes}
        known = {outcome.name for outcome in earlier}
        outcomes = [now.get(outcome.name, outcome) for outcome in earlier]
        outcomes += [outcome for name, outcome in now.items() if name not in known]
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1))
    if options.docs:
        from tests.engines.vllm.sweep.report import coverage_page

        options.docs.write_text(coverage_page(outcomes), encoding="utf-8")
    return 0 if len(passed) == len(made) else 1


def _tell(outcome: Outcome) -> None:
    if outcome.status == "passed":
        print(f"passed  {outcome.name}: {outcome.applications} applications, {outcome.seconds} s", flush=True)
    elif outcome.status == "failed" or "no class" not in outcome.reason:
        print(f"{outcome.status}  {outcome.name}: {outcome.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
