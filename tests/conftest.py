"""Shared settings of the tests: one thread, a fixed seed, no warnings from repeated hooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Every test starts from the same state of torch's generator and with the default dtype."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The networks are tiny: more threads only get in each other's way."""
    torch.set_num_threads(1)
