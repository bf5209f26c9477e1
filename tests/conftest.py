"""Shared settings of the tests: device, one thread, a fixed seed, and no time for what none of them needs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests import quick


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` runs the tests on a GPU."""
    parser.addoption("--device", default="cpu", help="where tests make their tensors (cpu, cuda; default cpu)")


def pytest_configure(config: pytest.Config) -> None:
    """Networks and data are made while tests are collected, too."""
    config.addinivalue_line("markers", "processor(why): only where tensors are in the processor's memory")
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))
        without_cudnn()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out that are of processors."""
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        if marker := item.get_closest_marker("processor"):
            item.add_marker(pytest.mark.skip(reason=f"only on a processor: {marker.args[0]}"))


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def without_cudnn() -> None:
    """Recurrent layers as torch computes them itself.

    cuDNN's have no gradients in evaluation mode, no second derivatives, and dropout that cannot be drawn again.
    `test_gpu.py` has tests of theirs.
    """
    for name in RECURRENT:
        setattr(torch._VF, name, torch.backends.cudnn.flags(enabled=False)(getattr(torch._VF, name)))
    torch.backends.cudnn.is_acceptable = lambda x: False
    torch.backends.cudnn.allow_tf32 = False  # tests compare what float32 rounds


@pytest.fixture
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recurrent layers by cuDNN, and tensors on the processor unless it is said otherwise, also with `--device`."""
    for name in RECURRENT:
        monkeypatch.setattr(torch._VF, name, getattr(torch._C._VariableFunctions, name))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: x.is_cuda and torch.backends.cudnn.enabled)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.device("cpu"):
        yield


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A GPU on which an assertion has failed is of no use any more: the process ends, and another one goes on."""
    if item.config.getoption("--device").startswith("cuda"):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


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


@pytest.fixture(scope="session", autouse=True)
def comparisons() -> Iterator[None]:
    """Tensors that are close are found to be so in less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.testing, "assert_close", quick.assert_close)
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
