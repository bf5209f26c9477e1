"""`bpk.accumulate` as users call it: other batches, devices and types, rows, and bad input."""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bpk
from bpk import extensions as E
from bpk.dataset.batches import moved
from bpk.dataset.fingerprint import digest
from tests.bpk.dataset.test_accumulate import assert_same, split, whole
from tests.helpers import mlp


def few(n: int = 7) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return mlp(), torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


# ---- batches, modes, precision ------------------------------------------------------------------------


@pytest.mark.processor("the test moves the model there")
def test_batches_that_are_dictionaries_take_a_step() -> None:
    model, x, y = few()
    batches = [{"inputs": {"x": a}, "labels": b, "names": ["?"] * len(b)} for a, b in split(x, y, 2, 4, 1)]

    def step(model: nn.Module, loss_fn: nn.Module, batch: dict[str, Any]) -> Tensor:
        loss: Tensor = loss_fn(model(batch["inputs"]["x"]), batch["labels"])
        return loss

    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.KFLR(), step=step, device="cpu")
    assert_same(found, whole(model, nn.CrossEntropyLoss(), x, y, E.KFLR()))
    with pytest.raises(ValueError, match=r"Batch 0 of the loader is \{'inputs': .*no pair.*\n.*\n.*step="):
        bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.KFLR())


@pytest.mark.parametrize("extension", [E.KFLR, E.Variance])
def test_a_loss_that_the_model_computes_itself(extension: Any) -> None:
    model, x, y = few()

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    batches, loss_fn = split(x, y, 2, 4, 1), nn.CrossEntropyLoss()
    expected = bpk.accumulate(model, loss_fn, batches, extension())
    found = bpk.accumulate(Inside(), loss_fn, batches, extension(), step=lambda model, _, batch: model(*batch)["loss"])
    for field in (extension().savefield, "grad"):
        for name, value in expected.field(field).items():
            torch.testing.assert_close(found.field(field)[f"layers.{name}"], value)


class Encoding(UserDict[str, Tensor]):
    """As tokenizers give it: read by attributes, and moved by a method of its own."""

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["data"][name]

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: x.to(device) for key, x in self.data.items()}
        return self


@pytest.mark.processor("they are moved, or arrays of numpy")
def test_batches_that_know_how_they_are_moved() -> None:
    batches = [Encoding(x=torch.randn(4, 3), y=torch.arange(4) % 2)]

    def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model(batch.x), batch.y)

    assert bpk.accumulate(nn.Linear(3, 2), nn.CrossEntropyLoss(), batches, step=step, device="cpu").samples == 4
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 3), torch.tensor([3, 2]), batch_first=True)
    there = moved(packed, torch.device("meta"))
    assert there.data.is_meta and there.batch_sizes.device.type == "cpu"  # where torch wants it
    edges = moved(Edges(torch.zeros(2), torch.ones(2)), torch.device("meta"))
    assert isinstance(edges, Edges) and edges.to.is_meta  # a field, and no method
    names = moved(Names([torch.zeros(2), "a"]), torch.device("meta"))
    assert isinstance(names, Names) and names[0].is_meta
    pair = Pair(torch.zeros(2), {"y": torch.ones(2)})
    there = moved(pair, torch.device("meta"))
    assert there.x.is_meta and there.rest["y"].is_meta and not pair.x.is_meta
    there = moved(batches[0], torch.device("meta"))
    assert isinstance(there, Encoding) and there.x.is_meta and not batches[0].x.is_meta  # though it moves itself


class Noted(Tensor):
    """Knows whether it was to be moved while others go on."""

    asked: list[bool]

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:  # type: ignore[override]
        self.asked.append(non_blocking)
        return self


def test_what_comes_to_the_processor_is_there() -> None:
    """Torch copies it into pinned memory, and would return before it is."""
    x = torch.zeros(2).as_subclass(Noted)
    x.asked = []
    for device in ("cpu", "meta"):
        moved(x, torch.device(device))
    assert x.asked == [False, True]


class Names(list[Any]):
    """A list of one's own."""


@dataclass(frozen=True)
class Pair:
    x: Tensor
    rest: Any


@pytest.mark.processor("they are moved, or arrays of numpy")
def test_batches_are_told_apart_by_what_they_hold() -> None:
    """Processes that share a loader, and runs that go on, compare nothing else."""
    for make in (lambda x: Pair(x, 0), lambda x: [x.numpy()], lambda x: {"y": Pair(torch.zeros(1), x.numpy())}):
        assert digest(make(torch.ones(2))) == digest(make(torch.ones(2))) != digest(make(torch.zeros(2)))
    names = [numpy.array([chr(97), other], object) for other in ("b", chr(98), "c")]
    assert digest(names[0]) == digest(names[1]) != digest(names[2])


class Edges(NamedTuple):
    start: Tensor
    to: Tensor


def test_a_data_loader() -> None:
    model, x, y = few(11)
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), DataLoader(TensorDataset(x, y), 4), E.Variance())
    assert_same(found, whole(model, nn.CrossEntropyLoss(), x, y, E.Variance()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_half_precision(dtype: torch.dtype | None) -> None:
    """Autocast, or a model in half precision: sums are in float32, and nothing is lost over many batches."""
    torch.manual_seed(0)
    x, y = torch.randn(600, 4), torch.randint(3, (600,))
    model = mlp(torch.float32)
    exact = whole(model.double(), nn.CrossEntropyLoss(), x.double(), y, E.SumGradSquared(), E.Variance(), E.KFLR())
    model.float()
    if dtype is None:
        model, x = model.bfloat16(), x.bfloat16()
    batches = split(x, y, *[2] * 300)
    some = E.SumGradSquared(), E.Variance(), E.KFLR()
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *some, autocast=dtype)
    assert all(x.dtype is torch.float32 for x in (found["0.weight"]["variance"], *found["0.weight"]["kflr"]))
    assert_same(found, exact, 0.05)


def test_two_losses_of_the_same_kind_and_two_that_are_not() -> None:
    model, x, y = few()
    loss_fn = nn.CrossEntropyLoss()

    def twice(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        loss: Tensor = loss_fn(out, batch[1]) + 0.5 * loss_fn(2 * out, batch[1])
        return loss

    found = bpk.accumulate(model, loss_fn, split(x, y, 2, 5), E.Variance(), E.DiagGGNExact(), step=twice)
    one = bpk.accumulate(model, loss_fn, [(x, y)], E.Variance(), E.DiagGGNExact(), step=twice)
    assert_same(found, one)

    def scaled(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = loss_fn(model(batch[0]), batch[1]) * len(batch[0])
        return loss

    with pytest.raises(ValueError, match=r"losses of batch 1 are not weighted"):
        bpk.accumulate(model, loss_fn, split(x, y, 2, 5), step=scaled)
    ignoring = nn.CrossEntropyLoss(ignore_index=0)

    def mixed(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        loss: Tensor = loss_fn(out, batch[1]) + bpk.extend(ignoring)(out, batch[1])
        return loss

    y = torch.tensor([0, 1, 1, 2, 1, 1, 2])
    with pytest.raises(ValueError, match=r"losses of batch 1 are not weighted.*\n.*divide by \[5.0, 5.0\]"):
        bpk.accumulate(model, loss_fn, split(x, y, 2, 5), step=mixed)


# ---- rows ---------------------------------------------------------------------------------------------


def test_rows_for_a_callback() -> None:
    """Rows of the summed loss, whatever batch a sample is in."""
    model, x, y = few()
    seen: list[tuple[int, dict[str, Any]]] = []
    found = bpk.accumulate(
        model, nn.CrossEntropyLoss(), split(x, y, 2, 4, 1), E.BatchGrad(), E.SqrtGGNExact(), E.Variance(),
        callback=lambda number, fields: seen.append((number, fields)),
    )  # fmt: skip
    expected = whole(model, nn.CrossEntropyLoss(reduction="sum"), x, y, E.BatchGrad(), E.SqrtGGNExact())
    assert [number for number, _ in seen] == [0, 1, 2] and set(found["0.bias"]) == {"grad", "variance"}
    for name in expected:
        for field, axis in (("grad_batch", 0), ("sqrt_ggn_exact", 1)):
            rows = torch.cat([fields[name][field] for _, fields in seen], axis)
            torch.testing.assert_close(rows, expected[name][field])


def test_rows_on_disk(tmp_path: Path) -> None:
    model, x, y = few()
    some = E.BatchGrad(), E.SqrtGGNExact(), E.BatchL2Grad()
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), split(x, y, 2, 4, 1), *some, per_sample=tmp_path / "rows")
    expected = whole(model, nn.CrossEntropyLoss(), x, y, *some)
    for name, fields in expected.items():
        for e in some:
            rows = found[name][e.savefield]
            assert type(rows).__name__ == "memmap" and rows.shape == tuple(fields[e.savefield].shape)
            torch.testing.assert_close(torch.tensor(rows), fields[e.savefield])
    assert not list(tmp_path.glob("*/*/*.rows")) and not list(tmp_path.glob("*/*/*.part"))
    with pytest.raises(ValueError, match=r"holds rows of an earlier run.*\n.*\n.*another folder"):
        bpk.accumulate(model, nn.CrossEntropyLoss(), split(x, y, 7), *some, per_sample=tmp_path / "rows")


# ---- bad input ----------------------------------------------------------------------------------------


@pytest.mark.processor("an index out of range ends a process that uses a GPU")
def test_batches_that_are_bad_are_named() -> None:
    model, x, y = few(9)
    loss_fn = nn.CrossEntropyLoss()

    def third(batch: Any) -> list[Any]:
        batches: list[Any] = split(x, y, 4, 3, 2)
        batches[2] = batch
        return batches

    nan, inf = x[7:].clone(), x[7:].clone()
    nan[1, 2], inf[0, 0] = float("nan"), float("inf")
    for bad, what in [
        ((nan, y[7:]), "Batch 2 of the loader has a loss of nan"),
        ((x[:0], y[:0]), "Batch 2 of the loader has no samples"),
        ((x[7:], y[7:], 0), "Batch 2 of the loader is built differently"),
        ({"x": x[7:], "y": y[7:]}, "Batch 2 of the loader is built differently"),
        ((x[7:].float(), y[7:]), "Batch 2 of the loader is built differently.*\n.*float64.*float32"),
    ]:
        with pytest.raises(ValueError, match=what):
            bpk.accumulate(model, loss_fn, third(bad), E.Variance())
    with pytest.raises(IndexError) as error:  # a label that there is not
        bpk.accumulate(model, loss_fn, third((x[7:], y[7:] + 5)))
    if sys.version_info >= (3, 11):
        assert error.value.__notes__ == ["This was batch 2 of the loader (numbers count from 0)."]


def test_errors_of_the_loader_name_the_batch() -> None:
    def loader() -> Iterator[Any]:
        yield torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
        raise OSError("a file that cannot be read")

    with pytest.raises(OSError, match="cannot be read") as error:
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), loader())
    if sys.version_info >= (3, 11):
        assert error.value.__notes__ == ["This was batch 1 of the loader (numbers count from 0)."]


def test_things_that_are_no_models() -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        bpk.accumulate(mlp().requires_grad_(False), nn.CrossEntropyLoss(), [])
    with pytest.raises(TypeError, match="loss_fn is no module"):
        bpk.accumulate(mlp(), nn.functional.cross_entropy, [])  # type: ignore[arg-type]


def test_gradients_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # type: ignore[operator, union-attr]
    batches = [(torch.ones(2, 2), torch.ones(2, 1)), (torch.zeros(2, 2), torch.ones(2, 1))]
    step = lambda model, loss_fn, batch: loss_fn(model(batch[0]).sqrt(), batch[1])  # noqa: E731
    with pytest.raises(ValueError, match="Batch 1 of the loader has a gradient that is not finite"):
        bpk.accumulate(model, nn.MSELoss(), batches, step=step)


def test_gradients_whose_squares_overflow_are_finite() -> None:
    model = nn.Linear(2, 1, bias=False)
    found = bpk.accumulate(model, nn.MSELoss(), [(1e25 * torch.ones(2, 2), torch.zeros(2, 1))], step=huge)
    torch.testing.assert_close(found["weight"]["grad"], torch.full((1, 2), 1e25))


def huge(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
    """A small loss with a large gradient: predictions are a half, whatever the model says."""
    out = model(batch[0])
    loss: Tensor = loss_fn(out - out.detach() + 0.5, batch[1])
    return loss


class Announcing(IterableDataset[Any]):
    """Has fewer samples than it says."""

    def __iter__(self) -> Iterator[Any]:
        yield from [(torch.ones(4, dtype=torch.float64), 1)] * 5

    def __len__(self) -> int:
        return 9


def test_loaders_that_are_empty_or_end_early() -> None:
    model = mlp()
    for empty in ([], iter(()), DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0)), 2)):
        with pytest.raises(ValueError, match=r"The loader ended after 0 batches.*\n.*nothing to add up"):
            bpk.accumulate(model, nn.CrossEntropyLoss(), empty)
    with pytest.raises(ValueError, match=r"The loader ended after 3 batches of 5.*\n.*not the whole data set"):
        bpk.accumulate(model, nn.CrossEntropyLoss(), DataLoader(Announcing(), 2))


class Twice(IterableDataset[Any]):
    """Says how many samples it has; each worker gives all of them, as datasets do that do not ask for their worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Announcing())

    def __len__(self) -> int:
        return 5


@pytest.mark.processor("torch's loaders draw there")
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_go_on_beyond_their_length(workers: int) -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    loader = DataLoader(Twice(), 1, num_workers=workers)
    if not workers:
        assert bpk.accumulate(model, loss_fn, loader).batches == 5
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, too
        with pytest.raises(ValueError, match=r"goes on with batch 5, where it should have ended.*\n.*announces 5"):
            bpk.accumulate(model, loss_fn, loader)
        whole = bpk.accumulate(model, loss_fn, (batch for batch in loader))  # of no length: taken as it is
    assert whole.batches == 10


def test_a_batch_too_many_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model, x, y = few()

    class Longer(list[Any]):
        def __len__(self) -> int:
            return 3

    path = tmp_path / "run"
    with pytest.raises(ValueError, match="batch 3"):
        bpk.accumulate(model, nn.CrossEntropyLoss(), Longer([(x, y)] * 4), checkpoint=path, every=1)
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), [(x, y)] * 3, checkpoint=path, every=1)
    assert found.batches == 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"every": 0}, "every=0"),
        ({"divisor": 3}, "divisor=3"),
        ({"step": lambda m, loss, b: m(b[0])}, "no loss: a tensor"),
        ({"step": lambda m, loss, b: nn.functional.cross_entropy(m(b[0]), b[1])}, "reached no extended loss"),
        ({"divisor": lambda batch: 0}, "a divisor of 0"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], what: str) -> None:
    model, x, y = few()
    with pytest.raises((ValueError, RuntimeError), match=what):
        bpk.accumulate(model, nn.CrossEntropyLoss(), [(x, y)], **options)


def test_what_is_no_extension() -> None:
    with pytest.raises(ValueError, match="the class KFAC instead of an instance"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], E.KFAC)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both save 'kfac'"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], E.KFAC(), E.KFAC(2))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sequences_of_labels(reduction: str) -> None:
    """`CTCLoss` takes steps of time before the batch axis; its mean is over samples."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 3).double(), nn.CTCLoss(reduction=reduction)
    x, labels = torch.randn(6, 5, 4).double(), torch.randint(1, 3, (6, 2))
    steps, lengths = torch.tensor([5, 4, 5, 5, 4, 5]), torch.tensor([2, 1, 2, 2, 2, 1])

    def step(model: nn.Module, loss_fn: nn.Module, some: list[int]) -> Tensor:
        log_p = model(x[some]).log_softmax(-1).transpose(0, 1)
        loss: Tensor = loss_fn(log_p, labels[some], steps[some], lengths[some])
        return loss

    found = bpk.accumulate(model, loss_fn, [[0, 1], [2, 3, 4, 5]], E.SumGradSquared(), step=step)
    expected = torch.autograd.grad(step(model, loss_fn, list(range(6))), model.weight)[0]
    scale = 6 if reduction == "mean" else 1
    each = [torch.autograd.grad(step(model, loss_fn, [n]) / scale, model.weight)[0] for n in range(6)]
    torch.testing.assert_close(found["weight"]["grad"], expected)
    torch.testing.assert_close(found["weight"]["sum_grad_squared"], torch.stack(each).square().sum(0))


class Tempered(nn.Module):
    """A loss that holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.loss = nn.Parameter(torch.tensor(0.5).double()), nn.CrossEntropyLoss()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(z * self.temperature.exp(), y)
        return loss


def test_parameters_of_a_loss_are_left_as_they_were() -> None:
    model, x, y = few()
    loss_fn = Tempered()
    bpk.accumulate(model, loss_fn, split(x, y, 2, 5), E.DiagGGNExact())
    assert loss_fn.temperature.grad is None and not vars(loss_fn.temperature)


def test_each_batch_finds_buffers_as_the_first_one_does() -> None:
    """Spectral normalisation in training mode takes one more step of its power iteration in each forward pass."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3).double())
    _, x, y = few()
    before = {name: b.clone() for name, b in layer.named_buffers()}
    found = bpk.accumulate(layer, nn.CrossEntropyLoss(), split(x, y, 2, 4, 1), E.DiagGGNExact())
    assert_same(found, bpk.accumulate(layer, nn.CrossEntropyLoss(), [(x, y)], E.DiagGGNExact()))
    assert all(torch.equal(b, before[name]) for name, b in layer.named_buffers())
