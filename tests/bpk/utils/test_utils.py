"""`bpk.utils`: flat vectors, subsampling, Kronecker factors, kinds of modules, data and references."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import bpk
from bpk.extensions import KFAC, DiagGGNExact, DiagHessian
from bpk.utils import examples, kroneckers
from bpk.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list
from bpk.utils.examples import autograd_diag_ggn_exact, autograd_diag_hessian
from bpk.utils.module_classification import is_loss, is_nll
from bpk.utils.sparse_factors import sparse_diagonal
from bpk.utils.subsampling import subsample
from tests.helpers import backward, data, mlp


# ---- vectors ------------------------------------------------------------------------------------
def test_vector_and_list() -> None:
    params = list(mlp().parameters())
    vector = torch.randn(sum(p.numel() for p in params), dtype=torch.float64)
    pieces = vector_to_parameter_list(vector, iter(params))
    assert [p.shape for p in pieces] == [p.shape for p in params]
    torch.testing.assert_close(parameters_to_vector(pieces), vector, rtol=0, atol=0)
    torch.testing.assert_close(parameter_list_to_vector(pieces), vector, rtol=0, atol=0)
    for wrong in (vector[:-1], vector[None], torch.ones(1)):
        with pytest.raises(ValueError, match=r"27 entries[\s\S]*Why:[\s\S]*Do:"):
            vector_to_parameter_list(wrong, params)


def test_subsample() -> None:
    x = torch.arange(24).reshape(2, 4, 3)
    assert subsample(x) is x
    torch.testing.assert_close(subsample(x, 1, [3, 0]), x[:, [3, 0]])
    torch.testing.assert_close(subsample(x, 0, torch.tensor([1])), x[1:])
    assert subsample(x, 1, []).shape == (2, 0, 3)
    with pytest.raises(IndexError, match=r"\[4\] for an axis of 4 samples"):
        subsample(x, 1, [4])


# ---- Kronecker factors --------------------------------------------------------------------------
def factors(*sizes: int) -> list[Tensor]:
    """Random positive definite matrices."""
    roots = [torch.randn(n, n + 1, dtype=torch.float64) for n in sizes]
    return [root @ root.T for root in roots]


SIZES = [(3,), (2, 3), (2, 3, 4), (1, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_with_kronecker_factors(sizes: tuple[int, ...]) -> None:
    given = factors(*sizes)
    dense = given[0]
    for factor in given[1:]:
        dense = torch.kron(dense, factor)
    torch.testing.assert_close(kroneckers.kfacs_to_mat(given), dense)
    vector, columns = torch.randn(len(dense), dtype=torch.float64), torch.randn(len(dense), 5, dtype=torch.float64)
    for mat in (vector, columns, columns.T.contiguous().T):
        torch.testing.assert_close(kroneckers.kfac_mat_prod(given)(mat), dense @ mat)
        torch.testing.assert_close(kroneckers.apply_kfac_mat_prod(given, mat), dense @ mat)
        solved = torch.linalg.solve(dense, mat)
        torch.testing.assert_close(kroneckers.inv_kfac_mat_prod(given)(mat), solved)
        torch.testing.assert_close(kroneckers.apply_inv_kfac_mat_prod(given, mat), solved)


@pytest.mark.parametrize("shift", [None, 0.5, [0.5, 2.0]], ids=str)
def test_inverses_are_shifted(shift: float | list[float] | None) -> None:
    given = factors(2, 3)
    shifts = shift if isinstance(shift, list) else [shift or 0.0] * 2
    found = kroneckers.inv_kfacs(given, shift)
    for inverse, factor, s in zip(found, given, shifts, strict=True):
        torch.testing.assert_close(inverse @ (factor + s * torch.eye(len(factor), dtype=torch.float64)), eye(factor))


def eye(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_diagonal_factor(layout: torch.layout) -> None:
    g, counts = factors(2)[0], torch.tensor([3.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that CSR is in beta
        sparse = counts.diag().to_sparse(layout=layout)
    dense = torch.kron(g, counts.diag())
    torch.testing.assert_close(kroneckers.kfacs_to_mat([g, sparse]), dense)
    mat = torch.randn(8, 3, dtype=torch.float64)
    torch.testing.assert_close(kroneckers.kfac_mat_prod([g, sparse])(mat), dense @ mat)
    shifted = torch.kron(g + 0.1 * eye(g), (counts + 0.1).diag())
    inverses = kroneckers.inv_kfacs([g, sparse], shift=0.1)
    assert inverses[1].is_sparse
    torch.testing.assert_close(kroneckers.apply_kfac_mat_prod(inverses, mat), torch.linalg.solve(shifted, mat))
    full = torch.ones(2, 2, dtype=torch.float64).to_sparse()
    with pytest.raises(ValueError, match=r"entries off its diagonal[\s\S]*to_dense"):
        kroneckers.inv_kfacs([full], shift=0.1)


def test_large_sparse_factor_stays_sparse() -> None:
    """A vocabulary of 50,000: its dense factor would take 10 GB."""
    size = 50_000
    a = sparse_diagonal(torch.rand(size))
    solve = kroneckers.inv_kfac_mat_prod([torch.eye(3), a], shift=0.5)
    assert solve(torch.ones(3 * size)).shape == (3 * size,)


def test_factors_of_kfac_give_the_block() -> None:
    """With one sample the Kronecker product of KFLR's factors is the GGN block; here it is used with KFAC's shapes."""
    model, loss_fn = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss())
    x, y = data(n=1)
    exact = bpk.extensions.KFLR()
    backward(model, loss_fn, x, y, KFAC(), exact, DiagGGNExact())
    for p in model.parameters():
        block = kroneckers.kfacs_to_mat(p.kflr)
        torch.testing.assert_close(block.diagonal().reshape(p.shape), p.diag_ggn_exact)
        columns = torch.randn(4, *p.shape, dtype=torch.float64)
        product = kroneckers.kfac_mat_prod(p.kflr)(columns.flatten(1).T).T.reshape(columns.shape)
        torch.testing.assert_close(product.flatten(1), columns.flatten(1) @ block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kroneckers_in_other_dtypes(dtype: torch.dtype) -> None:
    given = [f.to(dtype) for f in factors(2, 3)]
    for found in kroneckers.inv_kfacs(given, 0.1):
        assert found.dtype == dtype
    assert kroneckers.kfac_mat_prod(given)(torch.ones(6, dtype=dtype)).dtype == dtype


def test_products_are_differentiable() -> None:
    given = [f.requires_grad_() for f in factors(2, 2)]
    vector = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b, v: kroneckers.apply_kfac_mat_prod([a, b], v), (*given, vector))
    assert torch.autograd.gradcheck(
        lambda a, b, v: kroneckers.apply_inv_kfac_mat_prod([a, b], v, 0.1), (*given, vector)
    )


def test_bad_kronecker_input() -> None:
    given = factors(2, 3)
    for mat in (torch.ones(5), torch.ones(4, 6), torch.ones(1, 2, 3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"sizes \[2, 3\] cannot multiply[\s\S]*shape \[6, V\]"):
            kroneckers.kfac_mat_prod(given)(mat.double())
    for wrong in ([], [torch.ones(2)], [torch.ones(2, 3)]):
        with pytest.raises(ValueError, match="must be square matrices"):
            kroneckers.kfacs_to_mat(wrong)
    with pytest.raises(ValueError, match="1 shifts for 2 factors"):
        kroneckers.inv_kfacs(given, [1.0])
    with pytest.raises(ValueError, match=r"is singular[\s\S]*positive shift"):
        kroneckers.inv_kfacs([torch.zeros(2, 2)])
    with pytest.raises(ValueError, match="is singular with shift -1"):  # its inverse had infinite entries
        kroneckers.inv_kfacs([torch.eye(2).to_sparse()], -1.0)


def test_predicates() -> None:
    assert kroneckers.is_matrix(torch.ones(1, 1))
    assert kroneckers.is_vector(torch.ones(1))
    assert not kroneckers.is_vector(torch.tensor(1.0))
    assert kroneckers.all_tensors_of_order(2, [torch.ones(1, 1)] * 2)
    assert not kroneckers.all_tensors_of_order(2, [torch.ones(1, 1), torch.ones(1)])


# ---- kinds of modules ---------------------------------------------------------------------------
NLL = (nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.GaussianNLLLoss)
OTHER_LOSSES = (nn.HuberLoss, nn.L1Loss, nn.NLLLoss, nn.CTCLoss, nn.KLDivLoss)


def test_losses_are_told_apart() -> None:
    for loss in (*NLL, nn.SoftMarginLoss, nn.PoissonNLLLoss):
        assert is_loss(loss())
        assert is_nll(loss()), loss
    for loss in OTHER_LOSSES:
        assert is_loss(loss())
        assert not is_nll(loss()), loss
    assert not is_nll(nn.PoissonNLLLoss(log_input=False))
    for layer in (nn.Linear(1, 1), nn.Sequential(), nn.Softmax(1)):
        assert not is_loss(layer)
        assert not is_nll(layer)

    class MyLoss(nn.CrossEntropyLoss):
        """A subclass counts as what it inherits."""

    assert is_loss(MyLoss())
    assert is_nll(MyLoss())


# ---- references ---------------------------------------------------------------------------------
class OverTime(nn.Module):
    """Predictions `[N, C, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid().transpose(1, 2)


PROBLEMS: dict[str, Callable[[], tuple[nn.Module, nn.Module, Tensor, Tensor]]] = {
    "cross-entropy": lambda: (mlp(), nn.CrossEntropyLoss(), *data()),
    "mse": lambda: (mlp(), nn.MSELoss(), data()[0], torch.randn(5, 3, dtype=torch.float64)),
    "over time": lambda: (
        OverTime().double(),
        nn.CrossEntropyLoss(reduction="sum"),
        torch.randn(2, 5, 4, dtype=torch.float64),
        torch.randint(3, (2, 5)),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_references_agree_with_extensions(name: str) -> None:
    model, loss_fn, x, y = PROBLEMS[name]()
    plain = autograd_diag_ggn_exact(x, y, model, loss_fn), autograd_diag_hessian(x, y, model, loss_fn)
    bpk.extend(model), bpk.extend(loss_fn)
    extended = autograd_diag_ggn_exact(x, y, model, loss_fn), autograd_diag_hessian(x, y, model, loss_fn)
    backward(model, loss_fn, x, y, DiagGGNExact(), DiagHessian())
    ggn = parameters_to_vector([p.diag_ggn_exact for p in model.parameters()])
    hessian = parameters_to_vector([p.diag_h for p in model.parameters()])
    for found in (plain, extended):
        torch.testing.assert_close(found[0], ggn)
        torch.testing.assert_close(found[1], hessian)
    index = torch.linspace(0, len(ggn) - 1, 4, dtype=torch.int32)
    for some in (index, index.tolist()):
        torch.testing.assert_close(autograd_diag_ggn_exact(x, y, model, loss_fn, idx=some), ggn[index.long()])
        torch.testing.assert_close(autograd_diag_hessian(x, y, model, loss_fn, idx=some), hessian[index.long()])


def test_references_count_trainable_parameters() -> None:
    model, (x, y) = mlp(), data()
    full = autograd_diag_ggn_exact(x, y, model, nn.CrossEntropyLoss())
    model[0].weight.requires_grad_(False)
    torch.testing.assert_close(autograd_diag_ggn_exact(x, y, model, nn.CrossEntropyLoss()), full[12:])
    assert autograd_diag_ggn_exact(x, y, model, nn.CrossEntropyLoss(), idx=[]).shape == (0,)
    for wrong in (-1, 15):
        with pytest.raises(IndexError, match=rf"Entry {wrong} is asked of a diagonal with 15 entries"):
            autograd_diag_ggn_exact(x, y, model, nn.CrossEntropyLoss(), idx=[wrong])


# ---- data ---------------------------------------------------------------------------------------
@pytest.mark.processor("samplers draw there")
def test_digits_take_the_place_of_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)  # as if torchvision were not installed
    with pytest.warns(UserWarning, match="8 x 8 digits of scikit-learn") as seen:
        x, y = examples.load_one_batch_mnist(batch_size=32)
    assert len([w for w in seen if "scikit-learn" in str(w.message)]) == 1
    assert x.shape == (32, 1, 28, 28)
    assert y.shape == (32,)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    with pytest.warns(UserWarning):
        batches = examples.get_mnist_dataloader(batch_size=100, shuffle=False)
    assert sum(len(y) for _, y in batches) == 1797


@pytest.mark.processor("samplers draw there")
def test_mnist_is_loaded_where_it_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The arguments that torchvision gets, seen by a stand-in."""
    asked: dict[str, object] = {}

    class MNIST(torch.utils.data.TensorDataset):
        def __init__(self, root: str, **options: object) -> None:
            asked.update(options, root=root)
            super().__init__(torch.zeros(7, 1, 28, 28), torch.arange(7))

    torchvision, datasets, transforms = (ModuleType(n) for n in ("torchvision", "datasets", "transforms"))
    vars(datasets)["MNIST"] = MNIST
    for name in ("Compose", "Normalize", "ToTensor"):
        vars(transforms)[name] = lambda *arguments: arguments
    for name, module in (("", torchvision), (".datasets", datasets), (".transforms", transforms)):
        monkeypatch.setitem(sys.modules, f"torchvision{name}", module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = examples.load_one_batch_mnist(batch_size=5, root=tmp_path, download=False)
    assert x.shape == (5, 1, 28, 28)
    assert len(y) == 5
    assert asked["root"] == str(tmp_path)
    assert asked["train"] is True
    assert asked["download"] is False


def test_no_data_at_all_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match=r"No handwritten digits[\s\S]*pip install"):
        examples.load_mnist_dataset()
