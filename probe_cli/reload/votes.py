"""All ranks or none: each rank casts a ballot, and one of them, whoever is first to know, writes down the decision.

Ballots and the decision are keys in the process group's store, so a vote uses no collective, works beside any
backend, and does not hang when a rank is gone. The decision is taken by compare-and-set: every rank that can read it
reads the same one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from probe_cli.errors import ReloadError
from probe_cli.reload.receipt import Ballot

__all__ = ["Voter", "voter_for"]

_POLL_SECONDS = 0.01


class Voter:
    """Votes of one group of ranks over a key-value store (`set`, `get`, `check`, `compare_set`)."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: float, name: str = "reload") -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self._store = store
        # Sessions are numbered by each rank, so that a new session does not read the ballots of an old one.
        generation = store.add(f"probe-manifest/{name}/sessions/{rank}", 1)
        self._name = f"probe-manifest/{name}/{generation}"

    def vote(self, ballot: Ballot, subject: str) -> tuple[Ballot, ...]:
        """Cast this rank's ballot and return all of them, once it is decided that all agree.

        Raises ReloadError that says which rank disagreed or did not answer within the timeout (seconds). Every rank
        that can reach the store gets the same outcome. A ballot against is cast without waiting.
        """
        prefix = f"{self._name}/{ballot.update}/{subject}"
        try:
            self._store.set(f"{prefix}/{self.rank}", msgspec.json.encode(ballot))
            ballots = self._gather(prefix, self.timeout if ballot.ok else 0)
            decided = self._decide(prefix, _verdict(ballot, ballots, self.ranks))
            if not decided:  # agreed, so all of them are there, even if this rank read the decision first
                ballots = self._gather(prefix, self.timeout, until_decided=False)
        except Exception as error:  # the store raises DistStoreError, RuntimeError, ConnectionError
            raise ReloadError(
                f"rank {self.rank}: the ranks could not vote on the {subject}: {str(error).splitlines()[0]}",
                hint="the process that holds the group's store is gone; restart the group",
            ) from error
        if decided:
            raise ReloadError(f"rank {self.rank}: the ranks did not agree on the {subject}: {decided}")
        return tuple(ballots[rank] for rank in self.ranks)

    def heard(self, update: int, subject: str, timeout: float) -> tuple[Ballot, ...]:
        """The ballots that have been cast on an update, waiting for those of all ranks up to `timeout` seconds. After a vote that
        failed: every rank's own reason, where `vote` names those that had spoken first."""
        prefix, end = f"{self._name}/{update}/{subject}", time.monotonic() + timeout
        found: dict[int, Ballot] = {}
        while len(found) < len(self.ranks):
            for rank in self.ranks:
                key = f"{prefix}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = msgspec.json.decode(self._store.get(key), type=Ballot)
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        return tuple(found[rank] for rank in sorted(found))

    def _gather(self, prefix: str, timeout: float, *, until_decided: bool = True) -> dict[int, Ballot]:
        ballots: dict[int, Ballot] = {}
        end = time.monotonic() + timeout
        while True:
            for rank in self.ranks:
                key = f"{prefix}/{rank}"
                if rank not in ballots and self._store.check([key]):
                    ballots[rank] = msgspec.json.decode(self._store.get(key), type=Ballot)
            if len(ballots) == len(self.ranks) or any(not ballot.ok for ballot in ballots.values()):
                return ballots
            if time.monotonic() > end or (until_decided and self._store.check([f"{prefix}/decision"])):
                return ballots
            time.sleep(_POLL_SECONDS)

    def _decide(self, prefix: str, verdict: str) -> str:
        """Write the verdict unless one is written; the one that stands. Empty means agreed."""
        stands = self._store.compare_set(f"{prefix}/decision", "", "ok" if not verdict else f"no: {verdict}")
        text = stands.decode() if isinstance(stands, bytes) else str(stands)
        return "" if text == "ok" else text.removeprefix("no: ")


def _verdict(mine: Ballot, ballots: dict[int, Ballot], ranks: Sequence[int]) -> str:
    problems: list[str] = []
    for rank in ranks:
        ballot = ballots.get(rank)
        if ballot is None:
            problems.append(f"rank {rank} did not answer")
        elif not ballot.ok:
            problems.append(f"rank {rank}: {ballot.reason or 'failed'}")
        elif ballot.digest != mine.digest:
            problems.append(f"rank {rank} holds another bundle ({ballot.digest[:19]}, not {mine.digest[:19]})")
        elif ballot.update != mine.update:
            problems.append(f"rank {rank} is at update {ballot.update}, not {mine.update}")
    # Ranks that fail make the others stop waiting: name the failures, not those that had not answered yet.
    failed = [problem for problem in problems if "did not answer" not in problem]
    return "; ".join(failed or problems)


def voter_for(group: Any, timeout: float, name: str = "reload") -> Voter:
    """The voter of a `torch.distributed` process group, over the store that the processes met at."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    ranks = dist.get_process_group_ranks(group)
    store = distributed_c10d._get_default_store()
    return Voter(store, dist.get_rank(), ranks, timeout, f"{name}/{'-'.join(map(str, ranks))}")
