"""Pool of rank processes that the tests of a file share."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed as dist

import trunkline
from distributed.processes import RankFailedError, run


def pid_and_sum(degree: str) -> tuple[int, float, bool]:
    joined = dist.is_initialized()
    mesh = trunkline.init_mesh(**{degree: 2})
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total, group=mesh[degree].get_group())
    return os.getpid(), float(total), joined


def fail_on_rank_1() -> None:
    trunkline.init_mesh(sp=2)
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def test_functions_of_a_file_share_processes_but_no_process_group() -> None:
    first, second = run(2, pid_and_sum, "sp"), run(2, pid_and_sum, "cp")
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert [found[1:] for found in first + second] == [(3, False)] * 4
    assert {pid for pid, *_ in run(2, pid_and_sum, "sp", fresh=True)}.isdisjoint(pid for pid, *_ in first)


def test_a_failed_function_names_its_error_and_the_next_one_has_new_processes() -> None:
    before = run(2, pid_and_sum, "sp")
    with pytest.raises(RankFailedError, match="KeyError: 'lost'"):
        run(2, fail_on_rank_1)
    after = run(2, pid_and_sum, "sp")
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after)
    assert [found[1:] for found in after] == [(3, False)] * 2
