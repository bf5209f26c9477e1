"""Shared settings of the tests: one thread, a fixed seed, and no time for what none of them needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Tens of thousands of tests stay to the end: `gc.collect()` need not look at them each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def seeds() -> Iterator[None]:
    """Without other devices, `torch.manual_seed` formats three stack traces for the day on which there are some."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


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
