"""The trial of one node: a search while a request runs must find its content everywhere, and one after the last answer must
find nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Final

import httpx

from cloister.client.residue_audit.load import SHAPES, LoadResult, MarkedRequest, long_ids, long_stream, prompt_ids, send_all
from cloister.client.residue_audit.node import Path
from cloister.trust.residue.finder import Finder
from cloister.trust.residue.needles import KV_KIND, Mark, MarkMaker, Needle, of_text
from cloister.trust.residue.processes import Process, ProcessTree
from cloister.trust.residue.scan import USUAL_ROOTS, Runs, Searched, search_all, search_files

SETTLE_S: Final = 1.0
NUM_ROWS: Final = 25
"""Number of requests whose K/V rows and logits are computed and searched for."""
NUM_WATCHED: Final = 2
_SLICE: Final = 48
_WATCHED_CHUNKS: Final = 6
_WATCH_ATTEMPTS: Final = 3

RowNeedles = Callable[[Sequence[int], int], list[Needle]]
"""Maps the token ids of a prompt and its owner to needles: values that a model computes from it."""


@dataclass(slots=True)
class Looked:
    """One search of a whole node.

    Attributes:
        roles: role of each process, by its text in `searched`.
        missing: content processes in which a search during a request found nothing.
        ended: processes that were seen and have ended.
    """

    searched: list[Searched] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ended: list[Process] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def num_finds(self) -> int:
        return sum(len(one.finds) for one in self.searched)

    @property
    def gaps(self) -> list[str]:
        return [f"{one.where}: {gap}" for one in self.searched for gap in one.gaps]


@dataclass(slots=True)
class TraceVerdict:
    """The result of a trial.

    Attributes:
        shapes: request number -> its shape.
        obstacles: why the trial proves nothing, if so.
    """

    sent: LoadResult
    during: Looked
    after: Looked
    shapes: dict[int, str]
    num_needles: int
    obstacles: list[str]

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 something found, 2 could not test."""
        if self.after.num_finds:
            return 1
        return 2 if self.obstacles else 0


async def try_node(path: Path, maker: MarkMaker, num_requests: int, rows: RowNeedles) -> TraceVerdict:
    """Sends marked requests to a running node and searches it.

    Args:
        rows: computes the K/V rows and logits of a prompt.
    """
    since_s = time.time()
    marks = [maker.make(owner) for owner in range(num_requests + NUM_WATCHED)]
    calls = [(mark.owner, SHAPES[mark.owner % len(SHAPES)](mark)) for mark in marks[:num_requests]]
    shapes = {owner: call.shape for owner, call in calls}
    shapes |= dict.fromkeys(range(num_requests, num_requests + NUM_WATCHED), "watched stream")
    with ProcessTree(path.roots) as family:
        async with path.client() as client:
            during = await _look_during(client, path, family, marks[-NUM_WATCHED:], rows)
            sent = await send_all(client, calls)
        computed = [
            needle
            for mark, (owner, call) in zip(marks, calls, strict=False)
            if call.shape == "token ids" and owner // len(SHAPES) < NUM_ROWS
            for needle in rows(prompt_ids(mark), owner)
        ]
        needles = [needle for mark in marks for needle in mark.needles()]
        needles += [needle for owner, text in sent.answers for needle in _answer_needles(owner, text)]
        finder = Finder([*needles, *computed])
        runs = [(mark.owner, run) for mark in marks for run in mark.runs]
        await asyncio.sleep(SETTLE_S)
        after = await asyncio.to_thread(_look, path, family, finder, runs, since_s)
        after.ended = family.ended()
    obstacles = [f"during a request nothing was found in: {name}" for name in during.missing]
    obstacles += [f"not searched: {gap}" for gap in [*during.gaps, *after.gaps]]
    obstacles += [f"{count} requests did not end as they should: {what}" for what, count in sent.failures.items()]
    return TraceVerdict(sent, during, after, shapes, len(finder.needles), obstacles)


async def _look_during(
    client: httpx.AsyncClient, path: Path, family: ProcessTree, marks: Sequence[Mark], rows: RowNeedles
) -> Looked:
    """Searches while a stream runs, of a conversation and of token ids; then closes it, so that it is cancelled."""
    conversation, ids = marks
    looked = await _watch(client, path, family, conversation, long_stream(conversation), [])
    second = await _watch(client, path, family, ids, long_ids(ids), rows(prompt_ids(ids), ids.owner))
    return Looked(
        [*looked.searched, *second.searched],
        looked.roles | second.roles,
        [*looked.missing, *second.missing],
        elapsed_s=looked.elapsed_s + second.elapsed_s,
    )


async def _watch(
    client: httpx.AsyncClient, path: Path, family: ProcessTree, mark: Mark, call: MarkedRequest, computed: list[Needle]
) -> Looked:
    """Searches while a stream runs; on a busy machine it may end before all processes are stopped, so it is sent again."""
    finder = Finder([*mark.needles(), *computed])
    for attempt in range(_WATCH_ATTEMPTS):
        looked = await _watch_once(client, path, family, mark, call, finder)
        if computed and not any(find.kind == KV_KIND for one in looked.searched for find in one.finds):
            looked.missing.append("the engine: no K/V rows of the request, so they are not what is looked for afterwards")
        if not looked.missing or attempt == _WATCH_ATTEMPTS - 1:
            break
    return looked


async def _watch_once(
    client: httpx.AsyncClient, path: Path, family: ProcessTree, mark: Mark, call: MarkedRequest, finder: Finder
) -> Looked:
    num_chunks = 0
    async with client.stream("POST", call.path, content=call.body, headers={"content-type": "application/json"}) as reply:
        async for _ in reply.aiter_bytes():
            num_chunks += 1
            if num_chunks == _WATCHED_CHUNKS:
                return await asyncio.to_thread(_look, path, family, finder, [(mark.owner, run) for run in mark.runs], None)
    return Looked(missing=[f"everything: the watched stream ended after {num_chunks} chunks with status {reply.status_code}"])


def _look(path: Path, family: ProcessTree, finder: Finder, runs: Runs, since_s: float | None) -> Looked:
    """Searches everything while all processes are stopped.

    Args:
        since_s: files that changed since then are searched too; None searches no files and records which processes hold
            nothing.
    """
    begun_s = time.monotonic()
    with family.frozen() as processes:
        looked = Looked(search_all(processes, finder, runs), {str(process): path.role(process) for process in processes})
        if since_s is None:
            holders = [process for process in processes if path.holds_content(process)]
            found_in = {one.where for one in looked.searched if one.finds}
            looked.missing = [f"{path.role(process)} ({process})" for process in holders if str(process) not in found_in]
        else:
            roots: list[str | FilePath] = [*USUAL_ROOTS, FilePath.home() / ".cache" / "cloister"]
            looked.searched.append(search_files(processes, finder, since_s=since_s, roots=roots))
    looked.elapsed_s = time.monotonic() - begun_s
    return looked


def _answer_needles(owner: int, text: str) -> list[Needle]:
    """Slices of an answer, long enough to be unique."""
    found = []
    for start in range(0, len(text) - _SLICE + 1, 2 * _SLICE):
        part = text[start : start + _SLICE]
        if len(set(part)) >= 10:
            found += list(of_text(part, owner, prefix="answer "))
    return found
