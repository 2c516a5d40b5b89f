"""`docs/coverage.md`: what the sweep found, as a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from tests.engines.vllm.sweep.case import Outcome

__all__ = ["coverage_page"]

_HEAD = """# Which models of vLLM can be probed

Made by `make sweep`; do not edit. vLLM {vllm}, transformers {transformers}, torch {torch}, on a host without a GPU.

For every architecture of vLLM's registry that transformers has a class for, a small configuration is made (the defaults of
the architecture's own configuration class, depths cut) and a checkpoint of headers with the names and shapes that
`save_pretrained` would write. One rank is probed: TP2, rank 1, an emulated H100; experts are spread (EP2)
where the model has any. A case passes if the whole load is replayed, every write is attributed to its sources, and nothing
is logged as an error. What stands under *left aside* and *nothing writes* is what vLLM's loading code does with such a
checkpoint, and why, as told from the model that vLLM built. A note about names says where they had to be bent to those that
vLLM reads: that proves the replay, not the checkpoint.

**{passed} of {made} architectures and {special_passed} of {special_made} quantizations and topologies pass.** For {absent}
names of the registry transformers has no class (code of the model's repository, drafters, or names of vLLM alone); for
{unmade} more its defaults make no model.
"""


def coverage_page(outcomes: Sequence[Outcome]) -> str:
    """The page. Architectures are the outcomes whose names are identifiers, the others are the special cases."""
    architectures = sorted((o for o in outcomes if o.name.isidentifier()), key=lambda o: o.name.lower())
    special = [o for o in outcomes if not o.name.isidentifier()]
    absent = [o for o in architectures if o.status == "not made" and o.reason.startswith("no class")]
    unmade = [o for o in architectures if o.status == "not made" and o not in absent]
    made = [o for o in architectures if o.status != "not made"]
    lines = [
        _HEAD.format(
            vllm=version("vllm"),
            transformers=version("transformers"),
            torch=version("torch"),
            passed=_passed(made),
            made=len(made),
            special_passed=_passed(special),
            special_made=len(special),
            absent=len(absent),
            unmade=len(unmade),
        ),
        "## Quantizations and topologies\n",
        *_table(special),
        "\n## Architectures\n",
        *_table(o for o in made if o.status == "passed"),
    ]
    failed = [o for o in made if o.status == "failed"]
    if failed:
        lines += ["\n## Architectures that do not pass\n", "| architecture | why |", "|---|---|"]
        lines += [f"| {o.name} | {_cell(o.reason)} |" for o in failed]
    if unmade:
        lines += ["\n## Architectures for which no checkpoint could be made\n", "| architecture | why |", "|---|---|"]
        lines += [f"| {o.name} | {_cell(o.reason)} |" for o in unmade]
    return "\n".join(lines) + "\n"


def _passed(outcomes: Iterable[Outcome]) -> int:
    return sum(outcome.status == "passed" for outcome in outcomes)


def _table(outcomes: Iterable[Outcome]) -> list[str]:
    lines = [
        "| case | vLLM's class | ranks | sources | applications | declined | direct | left aside | nothing writes | note |",
        "|---|---|---|--:|--:|--:|--:|---|---|---|",
    ]
    for o in outcomes:
        note = o.bent if o.status == "passed" else f"**{o.status}**: {o.reason}"
        numbers = " | ".join(f"{count:,}" for count in (o.sources, o.applications, o.declined, o.direct))
        texts = " | ".join((_reasons(o.unused), _reasons(o.unfed), _cell(note)))
        lines.append(f"| {o.name} | {o.model} | {_ranks(o.topology)} | {numbers} | {texts} |")
    return lines


def _reasons(found: Mapping[str, Sequence[str]]) -> str:
    """Each reason and what it holds of, the reasons whole."""
    return "<br>".join(f"*{_cell(why)}*: {_cell('; '.join(names), 160)}" for why, names in found.items())


def _ranks(topology: str) -> str:
    """`tp=2 pp=1 ep=2 dp=1` as TP2 EP2."""
    sizes = [part.partition("=") for part in topology.split()]
    return " ".join(f"{name.upper()}{size}" for name, _, size in sizes if size != "1") or "TP1"


def _cell(text: str, limit: int = 300) -> str:
    text = re.sub(r"/\S*/tmp\w+", "FOLDER", re.sub(r"/tmp/\w+", "FOLDER", " ".join(text.split()))).replace("|", "\\|")
    text = re.sub(r"\S*/site-packages/", "", text)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("*", "\\*").replace("<", "&lt;")
