"""`derivatives_for`: products with the derivatives of single layers, against autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import bpk
from bpk.core.derivatives import LayerDerivatives, LossDerivatives, derivatives_for
from bpk.core.derivatives.convnd import weight_jac_t_save_memory
from bpk.jacobians.core.errors import UnsupportedLayer

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "Linear, extra axis": (lambda: nn.Linear(3, 2, bias=False), (2, 3, 3)),
    "Conv2d": (lambda: nn.Conv2d(2, 2, 2, padding=1), (2, 2, 3, 3)),
    "Tanh": (nn.Tanh, (3, 4)),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), (3, 2, 4)),
    "Softmax": (lambda: nn.Softmax(1), (3, 4)),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


class Problem:
    """An extended layer after its forward pass, and its Jacobians by autograd."""

    def __init__(self, name: str) -> None:
        build, shape = LAYERS[name]
        self.layer = build().double()
        self.x = torch.randn(shape, dtype=torch.float64)
        self.params = {n: p.detach() for n, p in self.layer.named_parameters()}
        self.jac = jacrev(self.at)(self.x)
        at_params = jacrev(lambda p: functional_call(self.layer, p, (self.x,)))
        self.param_jacs = at_params(self.params) if self.params else {}
        self.derivative = derivatives_for[type(self.layer)]
        self.out = bpk.extend(self.layer)(self.x.clone().requires_grad_())
        self.grad = torch.randn_like(self.out)
        self.g_out = (self.grad,)

    def at(self, x: Tensor) -> Tensor:
        return functional_call(self.layer, self.params, (x,))

    def columns(self, like: Tensor, v: int = 2) -> Tensor:
        return torch.randn(v, *like.shape, dtype=torch.float64)


@EVERY_LAYER
def test_products_with_the_input_jacobian(name: str) -> None:
    problem = Problem(name)
    x, out, layer, derivative = problem.x, problem.out, problem.layer, problem.derivative
    forth, back = problem.columns(x), problem.columns(out)
    matrix = problem.jac.reshape(out.numel(), x.numel())
    expected = (forth.flatten(1) @ matrix.T).reshape(2, *out.shape)
    torch.testing.assert_close(derivative.jac_mat_prod(layer, None, problem.g_out, forth), expected)
    torch.testing.assert_close(derivative.jac_mat_prod(module=layer, mat=forth), expected)
    expected = (back.flatten(1) @ matrix).reshape(2, *x.shape)
    torch.testing.assert_close(derivative.jac_t_mat_prod(layer, (None,), problem.g_out, back), expected)
    torch.testing.assert_close(derivative.jac_t_mat_prod(module=layer, mat=back, subsampling=None), expected)
    some = [1, 0]
    found = derivative.jac_t_mat_prod(layer, None, None, back[:, some], subsampling=some)
    torch.testing.assert_close(found, expected[:, some])


@EVERY_LAYER
def test_products_with_parameter_jacobians(name: str) -> None:
    problem = Problem(name)
    out, layer, derivative = problem.out, problem.layer, problem.derivative
    back = problem.columns(out)
    for param, value in problem.params.items():
        jac = problem.param_jacs[param]  # [N, *out, *p]
        rows = torch.einsum("vnk,nkp->vnp", back.flatten(2), jac.reshape(len(out), out[0].numel(), -1))
        rows = rows.reshape(2, len(out), *value.shape)
        torch.testing.assert_close(derivative.param_mjp(param, layer, None, None, back), rows.sum(1))
        found = derivative.param_mjp(param_str=param, module=layer, mat=back, sum_batch=False)
        torch.testing.assert_close(found, rows)
        found = derivative.param_mjp(param, layer, None, None, back[:, [1]], sum_batch=False, subsampling=[1])
        torch.testing.assert_close(found, rows[:, [1]])
        forth = problem.columns(value)
        expected = (forth.flatten(1) @ jac.reshape(out.numel(), -1).T).reshape(2, *out.shape)
        torch.testing.assert_close(derivative.param_jac_mat_prod(param, layer, None, None, forth), expected)
    with pytest.raises(ValueError, match=r"has no parameter 'gain'[\s\S]*its parameters are"):
        derivative.param_mjp("gain", layer, None, None, back)


@EVERY_LAYER
def test_second_derivative(name: str) -> None:
    problem = Problem(name)
    x, layer, derivative = problem.x, problem.layer, problem.derivative
    matrix = hessian(lambda z: (problem.at(z) * problem.grad).sum())(x).reshape(x.numel(), x.numel())
    mat = problem.columns(x)
    found = derivative.residual_mat_prod(layer, None, problem.g_out, mat)
    torch.testing.assert_close(found.flatten(1), mat.flatten(1) @ matrix)
    assert derivative.hessian_is_zero(layer) == (not matrix.any())
    assert derivative.hessian_is_diagonal(layer) == (not (matrix - matrix.diagonal().diag()).any())
    if derivative.hessian_is_diagonal(layer) and not derivative.hessian_is_zero(layer):
        diagonal = derivative.hessian_diagonal(layer, None, problem.g_out)
        torch.testing.assert_close(diagonal.flatten(), matrix.diagonal())
    with pytest.raises(ValueError, match=r"needs the gradient of its output[\s\S]*g_out="):
        derivative.residual_mat_prod(layer, mat=mat)


def test_averaged_congruence() -> None:
    problem = Problem("Linear")
    matrix = torch.randn(2, 2, dtype=torch.float64)
    matrix = matrix + matrix.T
    weight = problem.params["weight"]
    found = problem.derivative.ea_jac_t_mat_jac_prod(problem.layer, None, None, matrix)
    torch.testing.assert_close(found, weight.T @ matrix @ weight)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("cls", [nn.RNN, nn.LSTM, nn.GRU])
def test_layout_of_recurrent_layers(cls: type[nn.RNNBase], given_state: bool, batch_first: bool) -> None:
    """Columns have the layout of the layer's tensors, wherever the batch axis is; states may be nested."""
    layer = cls(3, 2, batch_first=batch_first).double()
    x = torch.randn((4, 5, 3) if batch_first else (5, 4, 3), dtype=torch.float64)
    h = torch.randn(1, 4, 2, dtype=torch.float64)
    state = ((h, h.clone()) if cls is nn.LSTM else h,) if given_state else ()
    params = {name: p.detach() for name, p in layer.named_parameters()}
    jac = jacrev(lambda z: functional_call(layer, params, (z, *state))[0])(x)
    out, _ = bpk.extend(layer)(x, *state)
    matrix = jac.reshape(out.numel(), x.numel())
    derivative = derivatives_for[layer]
    mat, vec = torch.randn(2, *out.shape, dtype=torch.float64), torch.randn(2, *x.shape, dtype=torch.float64)
    found = derivative.jac_t_mat_prod(layer, None, None, mat)
    torch.testing.assert_close(found.flatten(1), mat.flatten(1) @ matrix)
    torch.testing.assert_close(derivative.jac_mat_prod(layer, None, None, vec).flatten(1), vec.flatten(1) @ matrix.T)
    rows = derivative.param_mjp("weight_hh_l0", layer, None, None, mat, sum_batch=False)
    assert rows.shape == (2, 4, *layer.weight_hh_l0.shape)
    (expected,) = torch.autograd.grad(out, layer.weight_hh_l0, mat[0])
    torch.testing.assert_close(rows[0].sum(0), expected)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[int, ...]]] = {
    "mse": (nn.MSELoss, lambda: torch.randn(4, 3, dtype=torch.float64), (4, 3)),
    "cross-entropy": (nn.CrossEntropyLoss, lambda: torch.randint(3, (4,)), (4, 3)),
    "over time": (lambda: nn.CrossEntropyLoss(reduction="sum"), lambda: torch.randint(3, (2, 2)), (2, 3, 2)),
    "bce": (nn.BCEWithLogitsLoss, lambda: torch.rand(4, 2, dtype=torch.float64).round(), (4, 2)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    build, target, shape = LOSSES[name]
    loss_fn, y, x = bpk.extend(build()), target(), torch.randn(shape, dtype=torch.float64)
    full = hessian(lambda z: build()(z, y))(x).reshape(x.numel(), x.numel())
    n, d = len(x), x[0].numel()
    blocks = torch.stack([full[k * d : (k + 1) * d, k * d : (k + 1) * d] for k in range(n)])
    loss_fn(x.requires_grad_(), y)
    derivative = derivatives_for[loss_fn]
    assert isinstance(derivative, LossDerivatives)
    root = derivative.sqrt_hessian(loss_fn, None, None)
    torch.testing.assert_close(outer(root), blocks)
    torch.testing.assert_close(derivative.sqrt_hessian(module=loss_fn, subsampling=[1]), root[:, [1]])
    torch.testing.assert_close(derivative.sum_hessian(loss_fn, None, None), blocks.sum(0))
    mat = torch.randn(2, *shape, dtype=torch.float64)
    product = derivative.make_hessian_mat_prod(loss_fn, None, None)(mat)
    torch.testing.assert_close(product.flatten(1), mat.flatten(1) @ full)
    sampled = derivative.sqrt_hessian_sampled(loss_fn, None, None, mc_samples=40_000, subsampling=[0, 1])
    assert sampled.shape == (40_000, 2, *shape[1:])
    assert (outer(sampled) - blocks[:2]).abs().max() < 0.05 * blocks.abs().max()
    assert not derivative.hessian_is_zero(loss_fn)


def outer(root: Tensor) -> Tensor:
    """`sum_k s_kn s_kn^T` for every sample."""
    return torch.einsum("kni,knj->nij", root.flatten(2), root.flatten(2))


def test_a_loss_without_curvature() -> None:
    loss_fn = bpk.extend(nn.L1Loss())
    loss_fn(torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2))
    assert derivatives_for[loss_fn].hessian_is_zero(loss_fn)


def test_loss_without_a_hessian_by_samples() -> None:
    loss_fn = bpk.extend(nn.MSELoss(reduction="none"))
    loss_fn(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
    with pytest.raises(UnsupportedLayer, match="is no scalar"):
        derivatives_for[loss_fn].sqrt_hessian(loss_fn)


def test_the_table() -> None:
    assert nn.Linear in derivatives_for
    assert nn.Sequential not in derivatives_for
    assert derivatives_for.get(nn.Sequential) is None
    assert len(derivatives_for) == len(list(derivatives_for)) > 50
    assert {type(derivatives_for[cls]) for cls in derivatives_for} == {LayerDerivatives, LossDerivatives}
    derivative = derivatives_for[nn.Linear]
    assert derivative() is derivative, "scripts may create what the table holds"

    class MyLinear(nn.Linear):
        """A subclass that computes the same."""

    assert derivatives_for[MyLinear(1, 1)].rule is derivative.rule
    with pytest.raises(KeyError, match=r"no derivatives for Sequential\.") as seen:
        derivatives_for[nn.Sequential]
    assert "\n  Why: " in str(seen.value)


def test_missing_state_is_explained() -> None:
    layer = bpk.extend(nn.Linear(2, 1))
    derivative = derivatives_for[layer]
    mat = torch.ones(1, 3, 1)
    with pytest.raises(RuntimeError, match=r"has kept no forward pass[\s\S]*bpk\.extend\(module\), then module\(x\)"):
        derivative.jac_t_mat_prod(layer, None, None, mat)
    loss = layer(torch.ones(3, 2)).sum()
    assert derivative.jac_t_mat_prod(layer, None, None, mat).shape == (1, 3, 2)
    with pytest.raises(TypeError, match="'mat' is missing"):
        derivative.jac_t_mat_prod(layer)
    loss.backward()
    with pytest.raises(RuntimeError, match="its backward pass has freed what was kept"):
        derivative.jac_t_mat_prod(layer, None, None, mat)


def test_inside_of_a_hook() -> None:
    """The way scripts use it: while the backward pass visits the layers."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))), bpk.extend(nn.MSELoss())
    norms: list[Tensor] = []

    def hook(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            mat = torch.ones_like(module.output)[None]
            rows = derivatives_for[module].param_mjp("weight", module, None, None, mat, sum_batch=False)
            norms.append(rows.square().sum())

    with bpk.backpack(bpk.extensions.BatchGrad(), extension_hook=hook, retain_graph=True):
        loss_fn(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
    assert len(norms) == 2


def test_save_memory_is_accepted() -> None:
    model, loss_fn = bpk.extend(nn.Conv1d(1, 2, 2)), bpk.extend(nn.MSELoss())
    x, y = torch.randn(3, 1, 4), torch.randn(3, 2, 3)
    found = []
    for save_memory in (True, False):
        with weight_jac_t_save_memory(save_memory=save_memory), bpk.backpack(bpk.extensions.BatchGrad()):
            loss_fn(model(x), y).backward()
        found.append(model.weight.grad_batch.clone())
    torch.testing.assert_close(found[0], found[1])


def test_products_of_a_layer_are_no_forward_pass_of_a_model() -> None:
    """A loss that is called again had counted as a model that runs, with its inputs as the data of all later ones."""
    loss_fn = bpk.extend(nn.TripletMarginLoss())
    loss_fn(*(torch.randn(4, 3, requires_grad=True) for _ in range(3)))
    with contextlib.suppress(UnsupportedLayer):
        derivatives_for[loss_fn].sqrt_hessian(loss_fn)
    assert bpk.CTX.called is None and not bpk.CTX.given and bpk.CTX.given.data is None
