"""`DistributedDataParallel` in two processes: `.grad` is the mean over processes, fields are those of the own batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import bpk
from tests.bpk.distributed.processes import run_all

WORLD = 2


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo (torch.distributed)"
)
def test_every_setting(tmp_path: Path) -> None:
    """Static graphs included, in which torch's own node at the model's output starts the communication."""
    for status, text in run_all("tests.bpk.distributed.ddp_worker", WORLD, tmp_path):
        assert status == 0, text
        assert text.splitlines()[-1] == "right"


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo (torch.distributed)"
)
def test_fields_of_the_global_batch(tmp_path: Path) -> None:
    """`all_reduce` and `gather` after steps of unequal local batches, as users write them."""
    for status, text in run_all("tests.bpk.distributed.training_worker", WORLD, tmp_path):
        assert status == 0, text
        assert text.splitlines()[-1] == "right"


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo (torch.distributed)"
)
def test_sharded_models(tmp_path: Path) -> None:
    """FSDP2: fields are sharded as parameters are."""
    for status, text in run_all("tests.bpk.distributed.fsdp_worker", WORLD, tmp_path):
        assert status == 0, text
        assert text.splitlines()[-1] == "right"


@pytest.mark.parametrize("put_together", [bpk.distributed.all_reduce, bpk.distributed.gather])
def test_words_that_are_no_divisor_are_refused(put_together: Any) -> None:
    """All of them had been taken for "sum"."""
    with pytest.raises(ValueError, match="divisor='mean' is nothing that a loss divides by"):
        put_together(nn.Linear(2, 2), bpk.extensions.BatchGrad(), divisor="mean")
