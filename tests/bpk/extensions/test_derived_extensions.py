"""Second-order extensions made of module extensions only, on the classes that BackPACK's clients derive from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.core.derivatives import derivatives_for
from bpk.core.derivatives.basederivatives import BaseDerivatives
from bpk.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from bpk.core.derivatives.conv1d import Conv1DDerivatives
from bpk.core.derivatives.conv2d import Conv2DDerivatives
from bpk.core.derivatives.conv3d import Conv3DDerivatives
from bpk.core.derivatives.conv_transpose1d import ConvTranspose1DDerivatives
from bpk.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from bpk.core.derivatives.conv_transpose3d import ConvTranspose3DDerivatives
from bpk.core.derivatives.linear import LinearDerivatives
from bpk.custom_module.branching import Parallel, SumModule
from bpk.extensions.mat_to_mat_jac_base import MatToJacMat
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.extensions.secondorder.sqrt_ggn import (
    activations,
    custom_module,
    flatten,
    losses,
    pad,
    padding,
    pooling,
    slicing,
)
from bpk.extensions.secondorder.strategies import LossHessianStrategy


class Rows(MatToJacMat):
    """The square root's rows of each parameter, with methods that the constructor makes."""

    def __init__(self, derivatives: BaseDerivatives) -> None:
        for name in ("weight", "bias"):
            setattr(self, name, self.method(name))
        super().__init__(derivatives, params=["weight", "bias"])

    def method(self, name: str) -> Any:
        def rows(ext: Any, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
            some = ext.get_subsampling()
            return self.derivatives.param_mjp(name, module, g_inp, g_out, mat, sum_batch=False, subsampling=some)

        return rows


class Mine(SecondOrderBackpropExtension):
    def __init__(self, drawn: int | None = None, subsampling: list[int] | None = None) -> None:
        self.loss_hessian_strategy = LossHessianStrategy.SAMPLING if drawn else LossHessianStrategy.EXACT
        self.drawn = drawn
        extensions = {
            nn.CrossEntropyLoss: losses.SqrtGGNCrossEntropyLoss(),
            nn.MSELoss: losses.SqrtGGNMSELoss(),
            nn.Linear: Rows(LinearDerivatives()),
            nn.Conv2d: Rows(Conv2DDerivatives()),
            nn.ConvTranspose2d: Rows(ConvTranspose2DDerivatives()),
            nn.BatchNorm1d: Rows(BatchNormNdDerivatives()),
            nn.Tanh: activations.SqrtGGNTanh(),
            nn.ReLU: activations.SqrtGGNReLU(),
            nn.MaxPool2d: pooling.SqrtGGNMaxPool2d(),
            nn.AvgPool2d: pooling.SqrtGGNAvgPool2d(),
            nn.ZeroPad2d: padding.SqrtGGNZeroPad2d(),
            nn.Flatten: flatten.SqrtGGNFlatten(),
            nn.Identity: custom_module.SqrtGGNScaleModule(),
            SumModule: custom_module.SqrtGGNSumModule(),
        }
        super().__init__("mine", module_exts=extensions, subsampling=subsampling)

    def get_num_mc_samples(self) -> int | None:
        return self.drawn


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + torch.sin(h))


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (4, 3)),
    "images": (
        lambda: nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(2, 2, 2),
            nn.AvgPool2d(3), nn.Flatten(), nn.Linear(2, 2),
        ),
        (4, 1, 3, 3),
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Identity(), nn.Linear(3, 2)).eval(), (4, 3)),
    "branches": (lambda: Parallel(nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Tanh())), (4, 3)),
    "functions": (Functional, (4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("subsampling", [None, [2, 0]])
@pytest.mark.parametrize("drawn", [None, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_square_root_by_hand(name: str, drawn: int | None, subsampling: list[int] | None) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, loss_fn = bpk.extend(build().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    reference = E.SqrtGGNExact(subsampling) if drawn is None else E.SqrtGGNMC(drawn, subsampling)
    for extension in (reference, Mine(drawn, subsampling)):
        torch.manual_seed(1)
        with bpk.backpack(extension):
            loss_fn(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.mine, getattr(p, reference.savefield))


def test_a_hook_reads_the_loss() -> None:
    """Clients take the batch size from `loss.input0`, in their extension hook."""
    model, loss_fn = bpk.extend(MODELS["MLP"][0]()), bpk.extend(nn.CrossEntropyLoss())
    sizes: list[int] = []
    loss = loss_fn(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))

    def hook(module: nn.Module) -> None:
        if not any(module.children()):
            sizes.append(module.input0.shape[0])

    with bpk.backpack(Mine(), extension_hook=hook):
        loss.backward()
    assert sizes == [4] * 4


def test_a_layer_without_a_module_extension_is_refused() -> None:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 2), nn.GELU())), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
    message = r"(?s)GELU.*module extensions.*set_module_extension"
    with pytest.raises(NotImplementedError, match=message), bpk.backpack(Mine()):
        loss.backward()


class Pair(MatToJacMat):
    """A quantity that is no single tensor."""

    def backpropagate(self, ext: Any, module: nn.Module, grad_inp: Any, grad_out: Any, bpQuantities: Any) -> Any:
        return [{"columns": super().backpropagate(ext, module, grad_inp, grad_out, bpQuantities)}]


def test_what_functions_cannot_pass_is_refused() -> None:
    extension = Mine()
    extension.set_module_extension(nn.Linear, Pair(LinearDerivatives()), overwrite=True)
    model, loss_fn = bpk.extend(Functional()), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
    with pytest.raises(NotImplementedError, match=r"(?s)cannot pass 'torch.add'.*Why:.*Do:"), bpk.backpack(extension):
        loss.backward()


def test_blocks_of_columns() -> None:
    """Several blocks in a list stay several."""
    layer = bpk.extend(nn.Linear(3, 2))
    layer(torch.randn(4, 3))
    mats = [torch.randn(k, 4, 2) for k in (1, 2)]
    found = MatToJacMat(derivatives_for[nn.Linear]).backpropagate(Mine(), layer, (), (), mats)
    assert [f.shape for f in found] == [(1, 4, 3), (2, 4, 3)]


NAMED = {
    LinearDerivatives: nn.Linear, BatchNormNdDerivatives: nn.BatchNorm1d, Conv1DDerivatives: nn.Conv1d,
    Conv2DDerivatives: nn.Conv2d, Conv3DDerivatives: nn.Conv3d, ConvTranspose1DDerivatives: nn.ConvTranspose1d,
    ConvTranspose2DDerivatives: nn.ConvTranspose2d, ConvTranspose3DDerivatives: nn.ConvTranspose3d,
}  # fmt: skip


@pytest.mark.parametrize("cls", NAMED, ids=lambda c: c.__name__)
def test_names(cls: type[BaseDerivatives]) -> None:
    assert cls().rule is derivatives_for[NAMED[cls]].rule and isinstance(cls(), BaseDerivatives)
    assert {pad.SqrtGGNPad().layer.__name__, slicing.SqrtGGNSlicing().layer.__name__} == {"Pad", "Slicing"}


@pytest.mark.parametrize("cls", [nn.Linear, nn.Tanh])
def test_products_take_one_vector(cls: type[nn.Module]) -> None:
    layer = bpk.extend(cls(3, 3) if cls is nn.Linear else cls())
    layer(torch.randn(3, 3, requires_grad=True))
    derivative, mat = derivatives_for[layer], torch.randn(3, 3, 3)
    for product in (derivative.jac_mat_prod, derivative.jac_t_mat_prod):
        torch.testing.assert_close(product(layer, mat=mat[1]), product(layer, mat=mat)[1])
    for name in dict(layer.named_parameters()):
        for options in ({}, {"sum_batch": False}):
            several = derivative.param_mjp(name, layer, mat=mat, **options)
            torch.testing.assert_close(derivative.param_mjp(name, layer, mat=mat[1], **options), several[1])
        vectors = torch.randn(3, *getattr(layer, name).shape)
        several = derivative.param_jac_mat_prod(name, layer, mat=vectors)
        torch.testing.assert_close(derivative.param_jac_mat_prod(name, layer, mat=vectors[1]), several[1])


def test_equal_factors_are_in_memory_of_their_own() -> None:
    """What is done to one field in place is not done to another one of the same pass."""
    model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    with bpk.backpack(E.KFAC(), E.HBP()):
        loss_fn(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
    for p in model.parameters():
        before = [factor.clone() for factor in p.hbp]
        torch.testing.assert_close(p.kfac, before)
        for factor in p.kfac:
            factor.add_(1.0)
        p.kfac.pop()
        torch.testing.assert_close(p.hbp, before)
