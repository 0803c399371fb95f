"""Matrices over the devices of a team: whole matrices are prepared and finished on one device, the recursion is shared by columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from exl3.quantize.fitting import quantize_within_memory
from exl3.quantize.hessian import Hessian
from exl3.quantize.ldlq import Problem, Solution
from exl3.quantize.linear import EncodeAt, Group, Quantized, Settings, Work, finish, prepare, solve
from exl3.quantize.regularize import padded
from exl3.quantize.team import Part, Team, Worker, deal, share_columns
from exl3.quantize.transfer import move

Progress = Callable[[int], None]


@dataclass
class Wanted:
    """Matrices to quantize that share their input: checkpoint keys, (in, out) sizes, statistics on the lead's device."""

    name: str
    keys: list[str]
    shapes: list[tuple[int, int]]
    hessian: Hessian
    two_sided: bool = False  # such matrices cannot be cut into columns


# (worker, input, keys, statistics on the worker's device) -> the matrices on that device
Build = Callable[[Worker, Wanted, list[str], Hessian], Group]


def quantize_together(
    team: Team,
    wanted: Sequence[Wanted],
    build: Build,
    encode: EncodeAt,
    settings: Settings,
    progress: Progress | None = None,
    *,
    lead: bool = False,
) -> list[tuple[Worker, Quantized]]:
    """Every matrix of `wanted` with the worker on whose device its result lies; `lead`: only the lead holds the weights."""
    if len(team.workers) == 1:
        return _apart(team, wanted, [0] * sum(len(w.keys) for w in wanted), build, encode, settings, progress)
    speeds = [w.speed.search for w in team.workers]
    sizes = [padded(k) * padded(n) for w in wanted for k, n in w.shapes]
    owners = [0] * len(sizes) if lead else deal(sizes, speeds)
    try:
        results = None if any(w.two_sided for w in wanted) else _share(team, wanted, owners, speeds, build, encode, settings, progress)
    except torch.OutOfMemoryError:
        results = None
    if results is None:  # no copies of parts on other devices, and no more at once than fits
        torch.cuda.empty_cache()
        results = _apart(team, wanted, owners, build, encode, settings, progress)
    order = {key: i for i, key in enumerate(key for w in wanted for key in w.keys)}
    return sorted(results, key=lambda pair: order[pair[1].report.key])


def _groups(wanted: Sequence[Wanted], owners: list[int], build: Build, worker: Worker, number: int) -> list[Group]:
    """The groups of a worker, on its device."""
    owner = iter(owners)
    mine = [(w, [key for key in w.keys if next(owner) == number]) for w in wanted]
    return [build(worker, w, keys, w.hessian.on(worker.device)) for w, keys in mine if keys]


def _apart(
    team: Team, wanted: Sequence[Wanted], owners: list[int], build: Build, encode: EncodeAt, settings: Settings, progress: Progress | None
) -> list[tuple[Worker, Quantized]]:
    def work(worker: Worker, number: int) -> list[Quantized]:
        groups = _groups(wanted, owners, build, worker, number)
        return quantize_within_memory(groups, encode, settings, progress) if groups else []

    running = [(w, w.submit(partial(work, w, i))) for i, w in enumerate(team.workers)]
    return [(w, q) for w, future in running for q in future.result()]


def _share(
    team: Team,
    wanted: Sequence[Wanted],
    owners: list[int],
    speeds: list[float],
    build: Build,
    encode: EncodeAt,
    settings: Settings,
    progress: Progress | None,
) -> list[tuple[Worker, Quantized]]:
    started = time.monotonic()

    def get_ready(worker: Worker, number: int) -> list[Work]:
        groups = _groups(wanted, owners, build, worker, number)
        return prepare(groups, encode, settings) if groups else []

    running = [w.submit(partial(get_ready, w, i)) for i, w in enumerate(team.workers)]
    work = [(i, w) for i, future in enumerate(running) for w in future.result()]
    parts = share_columns([(w.target.shape[0], w.target.shape[1]) for _, w in work], [i for i, _ in work], speeds)
    problems = _cut(team, [w for _, w in work], parts)
    solved = [w.submit(partial(solve, mine, encode, settings, progress)) for w, mine in zip(team.workers, problems)]
    solutions = [iter(future.result()) for future in solved]
    for (owner, w), cut in zip(work, parts):
        pieces = [next(solutions[part.worker]) for part in cut]
        w.states, w.values = _join(pieces, team.workers[owner].device)
    mine = [[w for i, w in work if i == owner] for owner in range(len(team.workers))]
    ends = [(w, w.submit(partial(finish, m, settings, started))) for w, m in zip(team.workers, mine) if m]
    return [(w, q) for w, future in ends for q in future.result()]


def _cut(team: Team, work: list[Work], parts: list[list[Part]]) -> list[list[tuple[Problem, float]]]:
    """The problems of each worker, on its device."""
    problems: list[list[tuple[Problem, float]]] = [[] for _ in team.workers]
    for w, cut in zip(work, parts):
        whole = w.problem()
        lowers: dict[int, Tensor | None] = {}
        for part in cut:
            device = team.workers[part.worker].device
            if part.worker not in lowers:
                lowers[part.worker] = None if whole.lower is None else move(whole.lower, device)
            rotated = move(whole.rotated[:, part.start : part.stop].contiguous(), device)
            problems[part.worker].append((Problem(rotated, lowers[part.worker]), w.member.rate))
    return problems


def _join(pieces: list[Solution], device: torch.device) -> tuple[Tensor, Tensor]:
    if len(pieces) == 1:
        return move(pieces[0].states, device), move(pieces[0].values, device)
    return torch.cat([move(p.states, device) for p in pieces], 1), torch.cat([move(p.values, device) for p in pieces], 1)
