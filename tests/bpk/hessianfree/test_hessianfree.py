"""Matrix-free products: against the matrices that `torch.func` builds, on plain and on extended models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import bpk
from bpk.extensions import BatchGrad, DiagGGNExact
from bpk.hessianfree.ggnvp import ggn_vector_product, ggn_vector_product_from_plist
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.hessianfree.lop import L_op, transposed_jacobian_vector_product
from bpk.hessianfree.rop import R_op, jacobian_vector_product
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.utils.convert_parameters import vector_to_parameter_list
from tests.helpers import backward, data, mlp


def relu_net() -> nn.Sequential:
    """Convolution, in-place activation and pooling."""
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3))
    return nn.Sequential(*layers).double()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sigmoid": (mlp, (5, 4)),
    "relu, convolution": (relu_net, (5, 1, 4, 4)),
}
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss, lambda out: torch.randint(out.shape[1], (out.shape[0],))),
    "mse": (nn.MSELoss, torch.randn_like),
}
EXTENDED = pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
EVERY_CASE = pytest.mark.parametrize("case", CASES)


class Problem:
    """A model, its loss, and the dense matrices that go with them."""

    def __init__(self, case: str, loss: str = "cross-entropy", extended: bool = False) -> None:
        build, shape = CASES[case]
        make, target = LOSSES[loss]
        self.model, self.loss_fn = build(), make()
        self.x = torch.randn(shape, dtype=torch.float64)
        with torch.no_grad():
            self.y = target(self.model(self.x))
        self.names = [name for name, _ in self.model.named_parameters()]
        self.params = list(self.model.parameters())
        self.flat = parameters_to_vector(self.params).detach()
        self.hessian = torch.func.hessian(lambda v: self.loss_fn(self.at(v), self.y))(self.flat)
        self.jacobian = torch.func.jacrev(self.at)(self.flat).flatten(0, -2)
        output = self.model(self.x).detach()
        inner = torch.func.hessian(lambda out: self.loss_fn(out, self.y))(output)
        self.ggn = self.jacobian.T @ inner.reshape(output.numel(), -1) @ self.jacobian
        if extended:
            bpk.extend(self.model)
            bpk.extend(self.loss_fn)

    def at(self, vector: Tensor) -> Tensor:
        """The model's output at other parameters."""
        values = vector_to_parameter_list(vector, self.params)
        return functional_call(self.model, dict(zip(self.names, values, strict=True)), (self.x,))

    def run(self) -> tuple[Tensor, Tensor]:
        """Loss and output."""
        output = self.model(self.x)
        return self.loss_fn(output, self.y), output

    def vector(self) -> list[Tensor]:
        """A random vector, as a list of tensors in parameter shapes."""
        return [torch.randn_like(p) for p in self.params]


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


@EXTENDED
@EVERY_CASE
@pytest.mark.parametrize("loss", LOSSES)
def test_products_agree_with_matrices(case: str, loss: str, extended: bool) -> None:
    problem = Problem(case, loss, extended)
    value, output = problem.run()
    v = problem.vector()
    w = torch.randn_like(output)
    products = {
        "hessian": (hessian_vector_product(value, problem.params, v), problem.hessian @ flat(v)),
        "ggn": (ggn_vector_product(value, output, problem.model, v), problem.ggn @ flat(v)),
        "ggn of a list": (
            ggn_vector_product_from_plist(value, output, iter(problem.params), tuple(v)),
            problem.ggn @ flat(v),
        ),
        "jacobian": (jacobian_vector_product(output, problem.params, v), problem.jacobian @ flat(v)),
        "transposed": (
            transposed_jacobian_vector_product(output, problem.params, w),
            problem.jacobian.T @ w.flatten(),
        ),
    }
    for name, (product, expected) in products.items():
        assert isinstance(product, tuple), name
        assert not any(p.requires_grad for p in product), name
        torch.testing.assert_close(flat(product), expected, msg=name)
    shapes = [p.shape for p in problem.params]
    assert [p.shape for p in products["ggn"][0]] == shapes
    assert [p.shape for p in products["hessian"][0]] == shapes
    value.backward()  # the graph is still there


def test_gradient_may_be_given() -> None:
    problem = Problem("sigmoid")
    value, _ = problem.run()
    v = problem.vector()
    expected = problem.hessian @ flat(v)
    for create_graph in (True, False):  # without a graph, it is computed again instead of taken for a constant
        grads = torch.autograd.grad(value, problem.params, create_graph=create_graph, retain_graph=True)
        product = hessian_vector_product(value, problem.params, v, grad_params=grads)
        torch.testing.assert_close(flat(product), expected)


def test_single_tensors_count_as_lists_of_one() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(3, dtype=torch.float64)
    y = x**3
    torch.testing.assert_close(hessian_vector_product(y.sum(), x, v), (6 * x.detach() * v,))
    torch.testing.assert_close(R_op(y, x, v), (3 * x.detach() ** 2 * v,))
    torch.testing.assert_close(L_op([y], [x], [v]), (3 * x.detach() ** 2 * v,))
    torch.testing.assert_close(
        ggn_vector_product_from_plist((y**2).sum(), y, x, v), (2 * (3 * x.detach() ** 2) ** 2 * v,)
    )


def test_products_can_be_differentiated() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(3, dtype=torch.float64)

    def hvp(z: Tensor) -> Tensor:
        return hessian_vector_product((z**4).sum(), z, v, detach=False)[0]

    def ggn(z: Tensor) -> Tensor:
        out = z.sin()
        return ggn_vector_product_from_plist((out**4).sum(), out, z, v, detach=False)[0]

    def push(z: Tensor) -> Tensor:
        return jacobian_vector_product(z.sin(), z, v, detach=False)[0]

    def pull(z: Tensor) -> Tensor:
        return transposed_jacobian_vector_product(z.sin(), z, v, detach=False)[0]

    for product in (hvp, ggn, push, pull):
        assert torch.autograd.gradcheck(product, x)


@EXTENDED
def test_parameters_without_influence_give_zeros(extended: bool) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).double()
    model[0].bias.requires_grad_(False)
    if extended:
        bpk.extend(model)
    output = model[0](torch.ones(3, 2, dtype=torch.float64))
    loss = (output**2).sum()
    params = [p for p in model.parameters() if p.requires_grad]
    v = [torch.ones_like(p) for p in params]
    for product in (hessian_vector_product(loss, params, v), ggn_vector_product(loss, output, model, v)):
        assert [bool(p.any()) for p in product] == [True, False, False]
    every = list(model.parameters())  # the frozen one, too
    product = hessian_vector_product(loss, every, [torch.ones_like(p) for p in every])
    assert [bool(p.any()) for p in product] == [True, False, False, False]
    given = torch.autograd.grad((model[0](torch.ones(3, 2, dtype=torch.float64)) ** 2).sum(), params, allow_unused=True)
    assert given[1] is None
    again = hessian_vector_product(loss, params, v, grad_params=given)
    torch.testing.assert_close(again, hessian_vector_product(loss, params, v))
    linear = output.sum()  # its gradient depends on no parameter
    assert not flat(hessian_vector_product(linear, params, v)).any()
    assert not flat(jacobian_vector_product(torch.ones(3), params, v)).any()


def test_extensions_do_not_notice_products() -> None:
    """Products inside of a context save no field, and leave the pass of the context as it is."""
    problem = Problem("sigmoid", extended=True)
    reference = Problem("sigmoid", extended=True)
    reference.model.load_state_dict(problem.model.state_dict())
    backward(reference.model, reference.loss_fn, problem.x, problem.y, BatchGrad(), DiagGGNExact())
    value, output = problem.run()
    v = problem.vector()
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        product = ggn_vector_product(value, output, problem.model, v)
        hessian_vector_product(value, problem.params, v)
        assert not any("grad_batch" in vars(p) for p in problem.params)
        value.backward()
    torch.testing.assert_close(flat(product), problem.ggn @ flat(v))
    for p, q in zip(problem.params, reference.params, strict=True):
        torch.testing.assert_close(p.grad_batch, q.grad_batch)
        torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, loss_fn = mlp(dtype), nn.CrossEntropyLoss()
    x, y = data(dtype)
    output = model(x)
    v = [torch.randn_like(p) for p in model.parameters()]
    product = ggn_vector_product(loss_fn(output, y), output, model, v)
    assert {p.dtype for p in product} == {dtype}
    assert all(p.isfinite().all() for p in product)


def test_bad_input_is_refused_with_a_reason() -> None:
    problem = Problem("sigmoid")
    value, output = problem.run()
    v = problem.vector()
    with pytest.raises(ValueError, match=r"3 vectors for 4 parameters[\s\S]*Why:[\s\S]*Do:"):
        ggn_vector_product(value, output, problem.model, v[:-1])
    with pytest.raises(ValueError, match=r"shape \[2\] for number 0 of the parameters, which has shape \[3, 4\]"):
        hessian_vector_product(value, problem.params, [torch.ones(2), *v[1:]])
    with pytest.raises(ValueError, match="3 vectors for 4 parameters \\(grad_params\\)"):
        hessian_vector_product(value, problem.params, v, grad_params=v[:-1])
    with pytest.raises(ValueError, match=r"shape \[5, 3\][\s\S]*only a scalar"):
        hessian_vector_product(output, problem.params, v)
    with pytest.raises(ValueError, match=r"detached, or computed under torch\.no_grad"):
        hessian_vector_product(value.detach(), problem.params, v)
    with pytest.raises(ValueError, match="2 vectors for 1 functions"):
        transposed_jacobian_vector_product(output, problem.params, [output, output])
    for wrong in (output.detach(), problem.model(problem.x)):
        with pytest.raises(ValueError, match=r"does not know as a function of the output[\s\S]*very tensor"):
            ggn_vector_product(value, wrong, problem.model, v)


def test_products_in_inference_mode() -> None:
    """Derivatives of derivatives would be zero there: torch builds no graph, whatever it is asked."""
    model, loss_fn = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss()
    output = model(torch.randn(5, 3))
    loss, params = loss_fn(output, torch.randn(5, 2)), list(model.parameters())

    def products() -> list[torch.Tensor]:
        v = [torch.ones(p.shape) for p in params]
        pushed = jacobian_vector_product(output, params, v)
        return [*hessian_vector_product(loss, params, v), *ggn_vector_product(loss, output, model, v), *pushed]

    with torch.inference_mode():
        found = products()
    assert all(bool(x.any()) for x in found)
    torch.testing.assert_close(found, products())


def test_attention_whose_kernel_torch_differentiates_once_is_refused_in_words() -> None:
    model, x = (
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double(),
        torch.randn(2, 3, 4).double(),
    )
    vector = [torch.ones_like(p) for p in model.parameters()]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = model(x)
    loss = output.square().mean()
    for product in (
        lambda: hessian_vector_product(loss, list(model.parameters()), vector),
        lambda: ggn_vector_product(loss, output, model, vector),
    ):
        with pytest.raises(UnsupportedLayer, match=r"(?s)A product cannot pass.*Do: .*sdpa_kernel"):
            product()
    with sdpa_kernel(SDPBackend.MATH):
        output = model(x)
    found = ggn_vector_product(output.square().mean(), output, model, vector)
    assert all(bool(part.isfinite().all()) for part in found)
