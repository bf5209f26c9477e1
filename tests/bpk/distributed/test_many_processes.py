"""`bpk.accumulate` in 1, 2 and 4 processes gives what one large batch gives, and says which rank is at fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bpk.distributed.sums import folded, unfolded
from bpk.extensions import EKFLR, KFLR, BatchGrad, Variance
from bpk.extensions.over_batches import Rows
from tests.bpk.dataset.test_accumulate import assert_same, whole
from tests.bpk.distributed.many_processes_worker import QUANTITIES, problem, without_targets
from tests.bpk.distributed.processes import run_worlds

pytestmark = [
    pytest.mark.processor("processes talk by gloo"),
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"),
]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> dict[tuple[int, int], Found]:
    """What all ranks of all worlds have found; with four ranks, one of them has no batch."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    worlds = [1, 2, 4]
    for world, ranks in zip(
        worlds, run_worlds("tests.bpk.distributed.many_processes_worker", worlds, folder), strict=True
    ):
        for rank, (status, text) in enumerate(ranks):
            died = world > 1 and rank == world - 1
            assert status == (7 if died else 0), text
    return {
        (w, r): torch.load(folder / f"{w}-{r}.pt", weights_only=False)
        for w in worlds
        for r in range(w)
    }  # fmt: skip


def several(found: dict[tuple[int, int], Found], name: str) -> list[Any]:
    """One scenario on all ranks."""
    return [known[name] for (_, _), known in found.items() if name in known]


def fields(scenario: Found) -> Found:
    return {name: values for name, values in scenario.items() if name != "about"}


def test_one_two_and_four_processes_give_one_large_batch(found: dict[tuple[int, int], Found]) -> None:
    """All quantities, unequal batches, a rank without any, a layer that some batches do not use, a tied table."""
    model, x, y = problem()
    exact = [e for e in QUANTITIES if e.get_num_mc_samples() is None and not e.over_batches.approximates]
    expected = whole(model, nn.CrossEntropyLoss(), x, y, *exact)
    alone = found[1, 0]["all"]
    assert len(QUANTITIES) == 29
    for scenario in several(found, "all"):
        mine = fields(scenario)
        assert_same({name: {f: mine[name][f] for f in known} for name, known in expected.items()}, expected, 1e-10)
        assert_same(mine, fields(alone), 1e-10)  # sampled ones, too: draws belong to batches
        about, one = scenario["about"], alone["about"]
        assert (about["samples"], about["batches"], about["divisor"]) == (11, 3, 9.0)
        assert abs(about["loss"] - one["loss"]) < 1e-12


def test_moments_in_eigenbases_of_the_data_set(found: dict[tuple[int, int], Found]) -> None:
    """EKFAC in two passes: all ranks have the bases of the global factors, and moments add up."""
    model, x, y = problem()
    expected = whole(model, nn.CrossEntropyLoss(), x, y, EKFLR())
    for moments in several(found, "in bases"):
        for name, known in expected.items():  # order and signs of eigenvectors do not count
            mine, one = (m.flatten().sort().values for m in (moments[name]["moments"], known["ekflr"].moments))
            torch.testing.assert_close(mine, one, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_sums_by_owner(found: dict[tuple[int, int], Found], world: int) -> None:
    """Each sum is on one rank; rows are where they were computed."""
    alone = fields(found[1, 0]["all"])
    rows = {e.savefield for e in QUANTITIES if isinstance(e.over_batches, Rows)}
    parts = [fields(found[world, rank]["owner"]) for rank in range(world)]
    owned = [{n: {f: x for f, x in known.items() if f not in rows} for n, known in part.items()} for part in parts]
    together = {name: known for part in owned for name, known in part.items() if known}
    assert sum(bool(known) for part in owned for known in part.values()) == len(together)
    assert_same(together, {n: {f: x for f, x in known.items() if f not in rows} for n, known in alone.items()}, 1e-10)
    sizes = [len(part["conv.bias"]["grad_batch"]) if part.get("conv.bias", {}).get("grad_batch") is not None else 0
             for part in parts]  # fmt: skip
    assert sizes == ([9, 2] if world == 2 else [4, 2, 5, 0])
    torch.testing.assert_close(parts[0]["conv.bias"]["grad_batch"][:4], alone["conv.bias"]["grad_batch"][:4])


def test_bytes_of_kfac(found: dict[tuple[int, int], Found]) -> None:
    """Triangles of its factors travel, and hardly more (beside the gradient)."""
    triangle = [4 * n * (n + 1) // 2 for n in (96, 64, 96, 64, 96, 64)]
    gradient = 4 * (64 * 96 * 2 + 96 + 64)
    for sent in several(found, "counted"):
        assert sent["sums"] - gradient == sum(triangle)
        assert sent["sums"] - gradient + sent["told"] <= 1.1 * sum(triangle)


def test_a_process_in_which_no_target_counts(found: dict[tuple[int, int], Found]) -> None:
    model, x, y = without_targets()
    expected = whole(model, nn.CrossEntropyLoss(), x, y, Variance(), KFLR(), BatchGrad())
    assert len(several(found, "no targets")) == 2 + 4
    for scenario in several(found, "no targets"):
        assert_same(fields(scenario), expected, 1e-10)


def test_samplers(found: dict[tuple[int, int], Found]) -> None:
    """Ranks that shuffle apart share one order; a distributed sampler is not split again; own parts are possible."""
    model, x, y = problem()
    for name in ("shuffled apart", "own part", "with sampler"):
        for scenario in several(found, name):
            n = 8 if name == "with sampler" else 11
            targets = y if name == "shuffled apart" else y[:n].abs() % 3
            mine = fields(scenario)
            both = [e for e in QUANTITIES if e.savefield in next(iter(mine.values()))]
            assert_same(mine, whole(model, nn.CrossEntropyLoss(), x[:n], targets, *both), 1e-10)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("padded", ("DistributedSampler", "it repeats 1 of 11 samples")),
        ("split by itself", ("Rank 1 cannot share", "split=False")),
        ("drawn apart", ("Rank 1 cannot share", "other batches")),
        ("other model", ("Rank 1 runs something else than rank 0", "the model's tensor 'other.bias'")),
        ("other frozen", ("Rank 1 runs something else than rank 0", "'conv.weight' differs", ", frozen;")),
        ("other extension", ("Rank 1 runs something else than rank 0", "mc_samples=2")),
    ],
)
def test_errors_name_the_rank(found: dict[tuple[int, int], Found], name: str, parts: tuple[str, ...]) -> None:
    for told in several(found, name):
        if name == "padded" and "repeats 1 " not in told:
            continue  # 4 ranks: the same number
        for part in (*parts, "Why:", "Do:"):
            assert part in told


def test_a_rank_that_dies(found: dict[tuple[int, int], Found]) -> None:
    """Rank 0 names it; others say that they have lost it, or rank 0."""
    for world in (2, 4):
        assert f"Rank {world - 1} does not answer rank 0" in found[world, 0]["gone"]
    for rank in (1, 2):
        assert "does not answer" in found[4, rank]["gone"]


def test_a_batch_that_is_refused(found: dict[tuple[int, int], Found]) -> None:
    """Its rank names the batch, by its number among all; the others do not wait for long."""
    for world in (2, 4):
        assert "Batch 1 of the loader has a loss of nan" in found[world, 1]["spoilt"]
        assert "Rank 1 does not answer rank 0" in found[world, 0]["spoilt"]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 8])
def test_triangles(n: int) -> None:
    x: Tensor = torch.randn(n, n)
    x = x + x.T
    assert folded(x).numel() == n * (n + 1) // 2
    assert torch.equal(unfolded(folded(x), n), x)


def test_torchrun_goes_on_from_the_checkpoints(tmp_path: Path) -> None:
    """A rank that dies in its first life: the next one passes what is left, and gets what a run without death gets."""
    for kind in ("lives", "dies"):
        options = ("--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.bpk.distributed.restarted_worker")
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path), kind],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    lives, dies = (torch.load(tmp_path / f"{kind}.pt") for kind in ("lives", "dies"))
    torch.testing.assert_close(dies, lives, rtol=0, atol=0)
    passed = {
        (kind, rank): int((tmp_path / f"{kind}.{rank}").read_text()) for kind in ("lives", "dies") for rank in (0, 1)
    }
    assert passed["lives", 0] == passed["lives", 1] == 15
    assert passed["dies", 1] < 15, "it went on, and did not begin again"
