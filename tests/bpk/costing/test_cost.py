"""`bpk.cost` against passes of whole batches; its times are compared in benchmarks/cost.py, where nothing else runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.costing.allocated import allocated
from bpk.costing.cost import Cost, Estimate, extended_to
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.random_state import RandomState
from bpk.recording.context.state import CTX

pytestmark = pytest.mark.processor("memory of a GPU comes in blocks of 512 bytes and more")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_time_for_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is timed once here, where nobody looks at its time."""
    monkeypatch.setattr("bpk.costing.sub_batch.SECONDS", 0.0)


class Encoder(nn.Module):
    """Tokens `[N, T, D]`, one prediction for each sample."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))


def conv() -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 5))


MODELS = {"mlp": (mlp, (64, 20)), "conv": (conv, (48, 1, 8, 8)), "encoder": (Encoder, (32, 6, 16))}
QUANTITIES = [E.BatchGrad, E.DiagGGNExact, E.KFAC, E.DiagHessian]


def whole(
    model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, extensions: Sequence[BackpropExtension], **limits: int
) -> tuple[int, int]:
    """Peak, and bytes afterwards, of one pass of the whole batch."""

    def work() -> None:
        with bpk.backpack(*extensions, **limits):
            loss(model(x), y).backward()

    bpk.extend(model), bpk.extend(loss)
    work()  # what is made on first use
    for p in model.parameters():
        p.grad = None
        vars(p).clear()
    return allocated(work, CPU)


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_that_of_the_whole_batch(name: str, quantity: type[BackpropExtension]) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x, y = make(), torch.randn(shape), torch.randint(5, shape[:1])
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, quantity())[quantity.__name__]
    peak, kept = whole(model, nn.CrossEntropyLoss(), x, y, [quantity()])
    assert 1 / 2.2 < found.memory / peak < 2.2
    assert abs(found.kept - kept) < 0.02 * kept


def test_columns_and_rounds_are_those_of_the_whole_batch() -> None:
    """One column of the whole batch is 64 * 40 numbers at the largest layer; four of them fit here, of ten."""
    x, y = torch.randn(64, 20), torch.randint(10, (64,))
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), memory=3 * 4 * 64 * 40 * 4)
    assert (found.total.columns, found.total.rounds) == (10, 3)
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), chunk_size=5)
    assert (found.total.columns, found.total.rounds) == (10, 2)
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNMC(mc_samples=3), E.BatchGrad())
    assert [row.columns for row in found.rows] == [0, 3, 0, 3]


def test_a_limit_of_memory_is_that_of_the_whole_batch() -> None:
    """Foretold from eight samples without a look at the limit of the whole batch, the peak would be five times this."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 40))
    x, y = torch.randn(256, 20), torch.randint(40, (256,))
    limit = 3 * 4 * 256 * 200 * 4
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), memory=limit).total
    peak, _ = whole(model, nn.CrossEntropyLoss(), x, y, [E.DiagGGNExact()], memory=limit)
    assert 0.5 < found.memory / peak < 2 and found.rounds == 10


def test_pairs_of_samples_are_quadratic() -> None:
    model, x, y = nn.Linear(50, 3), torch.randn(256, 50), torch.randint(3, (256,))
    found = bpk.cost(model, nn.CrossEntropyLoss(), x, y, E.GradGram())["GradGram"]
    _, kept = whole(model, nn.CrossEntropyLoss(), x, y, [E.GradGram()])
    assert kept > 2 * 4 * 256**2 and abs(found.kept - kept) < 0.02 * kept


def test_two_quantities_of_a_kind_are_told_apart() -> None:
    few, many = E.DiagGGNMC(1), E.DiagGGNMC(20)
    many.savefield = "many"
    found = bpk.cost(mlp(), nn.CrossEntropyLoss(), torch.randn(8, 20), torch.arange(8) % 5, few, many)
    assert [found[name].columns for name in ("diag_ggn_mc", "many")] == [1, 20]


def test_nothing_is_left_behind() -> None:
    model, loss = conv(), nn.CrossEntropyLoss()
    bpk.extend(model[0])
    x, y = torch.randn(16, 1, 8, 8), torch.randint(5, (16,))
    modules, hooks = len(CTX.all_modules()), [len(m._forward_hooks) for m in model.modules()]
    state, generator = [p.detach().clone() for p in model.parameters()], RandomState.now()
    bpk.cost(model, loss, x, y, E.BatchGrad(), E.DiagGGNMC())
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))
    assert hooks == [len(m._forward_hooks) for m in model.modules()] and not loss._forward_hooks
    assert not generator.moved() and len(CTX.all_modules()) == modules


def test_in_the_context_of_another_pass() -> None:
    """Passes without extensions were taken for those of the context, whose forward pass had stored nothing."""
    model, loss_fn, x, y = bpk.extend(nn.Linear(3, 2)), bpk.extend(nn.MSELoss()), torch.randn(8, 3), torch.randn(8, 2)
    with bpk.backpack(E.KFLR()):
        loss = loss_fn(model(x), y)
        found = bpk.cost(model, nn.MSELoss(), x, y, E.Variance())
        loss.backward()
    assert found["Variance"].kept == bpk.cost(model, nn.MSELoss(), x, y, E.Variance())["Variance"].kept
    assert bpk.fields_of(model.weight).kflr[0].shape == (2, 2)


def test_statistics_of_a_normalisation_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    bpk.cost(model, nn.CrossEntropyLoss(), torch.randn(32, 4), torch.randint(3, (32,)), E.DiagGGNExact())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


class Last(nn.Module):
    """Time first: `[T, N, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


def test_another_batch_axis() -> None:
    x, y = torch.randn(7, 24, 4), torch.randint(3, (24,))
    found = bpk.cost(Last(), nn.CrossEntropyLoss(), x, y, E.BatchGrad(), batch_axis=1)
    assert found.batch == 24 and found.measured == (4, 8)


def test_targets_of_positions() -> None:
    class Each(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(0, 1)

    x, y = torch.randn(24, 5, 4), torch.randint(3, (24 * 5,))
    assert bpk.cost(Each(4, 3), nn.CrossEntropyLoss(), x, y, E.DiagGGNExact()).batch == 24


class Steps(Last):
    """A prediction for each step: `[T N, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).flatten(0, 1)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    """Cut along time, steps of all samples are taken for samples: this runs, and means something else."""
    x, y = torch.randn(24, 12, 4), torch.randint(3, (24 * 12,))
    with pytest.raises(ValueError, match=r"took 4 samples of the batch, and the loss has 12\.(.|\n)*batch_axis"):
        bpk.cost(Steps(), nn.CrossEntropyLoss(), x, y, E.BatchGrad())
    with pytest.raises(ValueError, match=r"took 4 samples of the batch, and the model fails(.|\n)*batch_axis"):
        bpk.cost(Last(), nn.CrossEntropyLoss(), x.transpose(0, 1)[:, :12], y[:12], E.BatchGrad())


def test_small_batches_are_measured() -> None:
    found = bpk.cost(nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(3, (5,)), E.KFAC())
    assert found.measured == (5,) and str(found).endswith("Of 5 samples, measured.")
    found = bpk.cost(nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(3, (5,)))
    assert [row.quantity for row in found.rows] == ["gradient"]


def test_wrong_arguments() -> None:
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(ValueError, match="got the class KFAC"):
        bpk.cost(nn.Linear(4, 3), nn.CrossEntropyLoss(), x, y, E.KFAC)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no module"):
        bpk.cost(nn.Linear(4, 3), nn.CrossEntropyLoss, x, y, E.KFAC())  # type: ignore[arg-type]


@pytest.mark.parametrize(("pairs", "few"), [(False, (4, 8)), (True, (4, 8, 16))])
def test_measurements_are_extended_by_what_they_are_made_of(pairs: bool, few: tuple[int, ...]) -> None:
    def t(n: int) -> float:
        return 3 + 0.5 * n + 0.25 * n * n * pairs

    assert extended_to(64, few, [t(n) for n in few], pairs) == pytest.approx(t(64))
    shrinking = extended_to(64, few, [5.0, 4.0, 3.0][: len(few)], pairs)
    assert 3 <= shrinking <= 5, "noise is no negative cost of samples"


def test_the_table() -> None:
    rows = (Estimate("gradient", 0.002, 3 << 20, 1 << 10), Estimate("DiagHessian", 2.5, 5 << 30, 2 << 10, 1034, 14))
    assert str(Cost(rows, 64, (4, 8))).splitlines()[2:] == [
        "gradient      2 ms         1.0        3 MiB  1 KiB",
        "DiagHessian  2.5 s      1250.0        5 GiB  2 KiB    1,034      14",
        "Of 64 samples, from 4 and 8 of them.",
    ]


def test_samples_that_are_named_are_in_the_batch() -> None:
    """They were looked for among the first ones, and `pass indices from 0 to N - 1` was the advice."""
    x, y = torch.randn(64, 20), torch.randint(5, (64,))
    some = (E.BatchGrad(subsampling=[0, 60]), E.WeightedGrad(torch.rand(64)), E.BatchKFLR([[0, 1], [2, 40]]))
    cost = bpk.cost(mlp(), nn.CrossEntropyLoss(), x, y, *some, E.Variance(), E.BatchL2Grad(subsampling=[1]))
    assert cost.whole == ("BatchGrad", "WeightedGrad", "BatchKFLR", "all 5") and cost.measured == (8, 16)
    assert str(cost).endswith("Of the whole batch, some of whose samples are named: " + ", ".join(cost.whole) + ".")
    numbers = sum(p.numel() for p in mlp().parameters())
    assert 4 * 3 * numbers <= cost["BatchGrad"].kept <= 4.1 * 3 * numbers  # the gradient, and those of two samples
    with pytest.raises(ValueError, match="sample index 64 is out of range"):
        bpk.cost(mlp(), nn.CrossEntropyLoss(), x, y, E.BatchGrad(subsampling=[64]))


def test_a_model_that_returns_its_loss() -> None:
    """The function that picks it is called with what the model returns."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layers(x), y)}

    batch = {"x": torch.randn(64, 6), "y": torch.randint(3, (64,))}
    found = bpk.cost(Tagger(), lambda output: output["loss"], batch, None, E.BatchGrad(), E.DiagGGNExact())
    assert found["DiagGGNExact"].columns == 3
    assert found["BatchGrad"].kept >= 4 * 64 * (6 * 4 + 4 + 4 * 3 + 3)
