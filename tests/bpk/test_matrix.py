"""The whole matrix: every extension on every network, against plain autograd in float64.

Networks come from the registry (`networks.py`), values from definitions (`reference.py`). A cell that
`bpk.support` refuses must raise exactly the reason that it gives; no other cell may raise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.function_module import TimesWeight
from bpk.plan.support import Kind
from bpk.rules import REGISTRY
from bpk.utils.ekfac import Eigenbasis
from bpk.utils.kroneckers import kfacs_to_mat
from tests.models.networks import Network, all_networks
from tests.references import averaged as reference_averaged
from tests.references import definition as reference_definition
from tests.references.reference import Reference

MC = 2

SEED = 7

NETWORKS = all_networks()


@lru_cache(maxsize=2)
def reference(name: str) -> Reference:
    """The reference of a network (tests run network by network, so few are kept)."""
    net = next(n for n in NETWORKS if n.name == name)
    model, lossfunc, x, targets = net.build()
    return Reference(model, (x,), net.loss_of(lossfunc, targets), seed=SEED, loss=type(lossfunc))


def run(net: Network, *extensions: BackpropExtension) -> nn.Module:
    """One backward pass under the extensions."""
    model, lossfunc, x, targets = net.build()
    model, lossfunc = bpk.extend(model), bpk.extend(lossfunc)
    torch.manual_seed(SEED)
    loss = net.loss_of(lossfunc, targets)(model(x))
    with bpk.backpack(*extensions):
        loss.backward()
    return model


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to rounding, with a message that names the parameter."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda m: f"{what}: {m}")


# ---- what each field must hold -----------------------------------------------------------------------
Check = Callable[[Reference, str, Any], None]


def equals(quantity: str) -> Check:
    """The field is the reference's quantity of this name."""

    def check(ref: Reference, name: str, found: Tensor) -> None:
        close(found, getattr(ref, quantity)(name), name)

    return check


def check_square_root(ref: Reference, name: str, found: Tensor) -> None:
    """Rows `[C, N, *p]` whose Gram matrix is the GGN of each sample."""
    columns = ref.D if ref.loss_hessian.any() else found.shape[0]  # a loss without curvature may have fewer
    assert found.shape == (columns, ref.N, *ref.params[name].shape), f"{name}: {tuple(found.shape)}"
    rows = found.flatten(2)
    close(torch.einsum("cnp,cnq->npq", rows, rows), ref.ggn_batch(name), name)


def multiplies(block: Callable[[Reference, str], Tensor]) -> Check:
    """The field is a function that multiplies `[V, *p]` with this block."""

    def check(ref: Reference, name: str, found: Callable[[Tensor], Tensor]) -> None:
        shape = ref.params[name].shape
        vectors = torch.randn(2, *shape, dtype=torch.float64)
        expected = (vectors.flatten(1) @ block(ref, name)).reshape(2, *shape)
        close(found(vectors), expected, name)
        close(found(vectors[:1]), expected[:1], name)  # a second call, with another number of vectors

    return check


def factors(of: Callable[[Reference, str], list[Tensor]]) -> Check:
    """The field is this list of Kronecker factors."""

    def check(ref: Reference, name: str, found: list[Tensor]) -> None:
        expected = of(ref, name)
        assert len(found) == len(expected), f"{name}: {len(found)} factors, expected {len(expected)}"
        for k, (f, e) in enumerate(zip(found, expected, strict=True)):
            close(f, e, f"{name}, factor {k}")

    return check


def check_eigenbasis(ref: Reference, name: str, found: Eigenbasis) -> None:
    """Orthogonal matrices that make the factors diagonal, and the block's own diagonal in them."""
    expected = ref.kflr(name)
    assert len(found.bases) == len(expected)
    for k, (basis, factor) in enumerate(zip(found.bases, expected, strict=True)):
        dense, within = basis.to_dense(), f"{name}, basis {k}"
        close(dense.T @ dense, torch.eye(len(dense), dtype=dense.dtype), within)
        turned = dense.T @ factor @ dense / factor.abs().max().clamp(min=1e-9)
        off = (turned - turned.diagonal().diag()).abs().max()
        assert off < (1e-8 if turned.is_cuda else 1e-9), f"{within}: {off:.1e}"
    block, numbers = ref.ggn(name), torch.arange(ref.params[name].numel()).reshape(ref.params[name].shape)
    module = ref.model.get_submodule(name.rpartition(".")[0])
    if len(expected) == 2 and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        numbers = numbers.T
    if len(expected) == 2 and getattr(module, "transposed", False):  # rows with the first two axes exchanged
        numbers = torch.cat([part.transpose(0, 1) for part in numbers.chunk(module.groups)])
    basis = kfacs_to_mat(found.bases)
    moments = (basis.T @ block[numbers.flatten()][:, numbers.flatten()] @ basis).diagonal()
    close(found.moments.flatten(), moments, f"{name}, moments")
    close(found.moments.sum(), block.diagonal().sum(), f"{name}, trace")


def hessian_block(ref: Reference, name: str) -> Tensor:
    return ref.hessian(name)


def ggn_block(ref: Reference, name: str) -> Tensor:
    return ref.ggn(name)


def clipped_block(ref: Reference, name: str) -> Tensor:
    return ref.chain.pchmp("clip")[name]


def absolute_block(ref: Reference, name: str) -> Tensor:
    return ref.chain.pchmp("abs")[name]


def kflr_factors(ref: Reference, name: str) -> list[Tensor]:
    return ref.kflr(name)


def kfra_factors(ref: Reference, name: str) -> list[Tensor]:
    return ref.chain.kfra()[name] if isinstance(ref.model, nn.Sequential) else reference_averaged.kfra(ref, name)


def clipped() -> BackpropExtension:
    return E.PCHMP(modify="clip")


def absolute() -> BackpropExtension:
    return E.PCHMP(modify="abs")


@dataclass(frozen=True)
class Row:
    """One extension of the matrix."""

    title: str
    make: Callable[[], BackpropExtension]
    field: str
    check: Check
    chain_only: bool = False
    """Whether the reference is a recursion over a chain of layers."""
    by_layers: bool = False
    """Whether it is a recursion over layers that have to be written down, if they are not a chain."""

    def has_reference(self, net: Network) -> bool:
        """Whether the value on this network is known."""
        if net.sequential or not (self.chain_only or self.by_layers):
            return True
        return self.by_layers and is_written_down(net)


@lru_cache(maxsize=2)
def is_written_down(net: Network) -> bool:
    """Whether a network that is no chain is known layer by layer."""
    return reference_averaged.graph_of(net.build()[0]) is not None


def defined(extension: BackpropExtension) -> Check:
    """The field is what the extension says by its definition."""

    def check(ref: Reference, name: str, found: Any) -> None:
        for value, expected in reference_definition.pairs(extension, ref, name, found):
            close(value, expected, name)

    return check


WRITTEN = (
    Row("BatchGrad", E.BatchGrad, "grad_batch", equals("grad_batch")),
    Row("BatchL2Grad", E.BatchL2Grad, "batch_l2", equals("batch_l2")),
    Row("SumGradSquared", E.SumGradSquared, "sum_grad_squared", equals("sum_grad_squared")),
    Row("Variance", E.Variance, "variance", equals("variance")),
    Row("DiagGGNExact", E.DiagGGNExact, "diag_ggn_exact", equals("diag_ggn")),
    Row("BatchDiagGGNExact", E.BatchDiagGGNExact, "diag_ggn_exact_batch", equals("diag_ggn_batch")),
    Row("DiagHessian", E.DiagHessian, "diag_h", equals("diag_h")),
    Row("BatchDiagHessian", E.BatchDiagHessian, "diag_h_batch", equals("diag_h_batch")),
    Row("SqrtGGNExact", E.SqrtGGNExact, "sqrt_ggn_exact", check_square_root),
    Row("KFLR", E.KFLR, "kflr", factors(kflr_factors)),
    Row("EKFLR", E.EKFLR, "ekflr", check_eigenbasis),
    Row("KFRA", E.KFRA, "kfra", factors(kfra_factors), by_layers=True),
    Row("HMP", E.HMP, "hmp", multiplies(hessian_block)),
    Row("GGNMP", E.GGNMP, "ggnmp", multiplies(ggn_block)),
    Row("PCHMP-clip", clipped, "pchmp", multiplies(clipped_block), chain_only=True),
    Row("PCHMP-abs", absolute, "pchmp", multiplies(absolute_block), chain_only=True),
)

DEFINED = tuple(
    Row(type(e).__name__, type(e), e.savefield, defined(e))
    for e in every_extension()
    if e.get_num_mc_samples() is None and e.form not in (Form.FACTORS, Form.GROUP_FACTORS, Form.EIGENBASIS)
)

ROWS = (*WRITTEN, *(row for row in DEFINED if row.field not in {written.field for written in WRITTEN}))
"""Definitions that are written down here, independently of the extensions, and those of all other extensions."""


@lru_cache(maxsize=2)
def refusals(name: str) -> dict[str, list[str]]:
    """The reasons for which `bpk.support` refuses the cells of a network by their rows, one per call of the network."""
    net = next(n for n in NETWORKS if n.name == name)
    return dict(zip([r.title for r in ROWS], refusals_of(net, *[row.make() for row in ROWS]), strict=True))


def refusals_of(net: Network, *extensions: BackpropExtension) -> list[list[str]]:
    """The reasons for which `bpk.support` refuses each extension."""
    model, lossfunc, x, targets = net.build()
    reasons: list[list[str]] = [[] for _ in extensions]
    asking: list[nn.Module] = []

    def ask(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        rule = REGISTRY.find(module)
        if module in asking:  # the answer evaluates it again
            return
        asking.append(module)
        if rule is not None or not list(module.children()):
            tensors = [t for t in inputs if isinstance(t, Tensor)]
            first = output if isinstance(output, Tensor) else output[0]
            call = Call(module, tensors, dict(module.named_parameters(recurse=False)), first)
            for extension, found in zip(extensions, reasons, strict=True):
                answer = bpk.support(extension, rule, call)
                if answer.kind is Kind.REFUSED:
                    found.append(answer.reason)
        asking.remove(module)

    for module in [*model.modules(), lossfunc]:
        module.register_forward_hook(ask)
    torch.manual_seed(SEED)
    net.loss_of(lossfunc, targets)(model(x))
    return reasons


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cells are tests of their own where some are asked for by name; all of them are one test for each network.

    To start and report eighteen thousand tests takes a minute.
    """
    if metafunc.definition.originalname != "test_cell":
        return
    if metafunc.config.option.keyword or any("::" in name for name in metafunc.config.args):
        chosen = [pytest.param(n, (r,), id=f"{n}-{r.title}") for n in NETWORKS for r in ROWS]
    else:
        chosen = [pytest.param(n, ROWS, id=str(n)) for n in NETWORKS]
    metafunc.parametrize(("net", "rows"), chosen)


def test_cell(net: Network, rows: Sequence[Row]) -> None:
    wrong = []
    for row in rows:
        torch.manual_seed(0)
        try:
            cell(net, row)
        except Exception:
            if len(rows) == 1:
                raise
            wrong.append(f"{net}-{row.title}\n{traceback.format_exc()}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(rows)} cells (each is a test where -k selects):", *wrong])


def cell(net: Network, row: Row) -> None:
    """The value of one extension on one network, or its refusal."""
    if not row.has_reference(net):
        refused_or_finite(net, row)
        return
    try:
        model = run(net, row.make())
    except UnsupportedLayer as error:
        reasons = refusals(net.name)[row.title]
        assert any(r in str(error) for r in reasons), f"raised without a documented reason: {error}"
        return
    assert not row.make().second_order or not refusals(net.name)[row.title], (
        "bpk.support refuses this cell, but nothing was raised"
    )
    ref = reference(net.name)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert not hasattr(param, row.field), f"{name} is frozen"
            continue
        row.check(ref, name, getattr(param, row.field))
        assert param.grad is not None
        close(param.grad, ref.grad(name), f"{name}.grad")


@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in NETWORKS if n.name in {"mlp", "cnn"}])
def test_definitions(net: Network) -> None:
    """What extensions say of themselves is what is written down here: a field that is right by one is by the other."""
    ref, model = reference(net.name), run(net, *[row.make() for row in DEFINED])
    assert {row.title for row in DEFINED} >= {
        row.title for row in WRITTEN if not row.title.startswith(("KF", "EKF", "PCHMP"))
    }
    for row in DEFINED:
        for name, param in model.named_parameters():
            row.check(ref, name, getattr(param, row.field))


def refused_or_finite(net: Network, row: Row) -> None:
    """Recursions on a graph whose layers nobody has written down: a clear refusal, or something finite."""
    try:
        model = run(net, row.make())
    except UnsupportedLayer as error:
        assert "Why:" in str(error) and "Do:" in str(error)
        return
    for name, param in model.named_parameters():
        if param.requires_grad:
            field = getattr(param, row.field)
            values = [field(torch.ones_like(param)[None])] if callable(field) else field
            assert all(torch.isfinite(v).all() for v in values), name


@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in NETWORKS])
def test_sampled(net: Network) -> None:
    """Sampled quantities that are active together share their draws, and hold what they promise."""
    sampled = (E.SqrtGGNMC(MC), E.DiagGGNMC(MC), E.BatchDiagGGNMC(MC), E.KFAC(MC))
    if any(refusals_of(net, sampled[0])):
        with pytest.raises(UnsupportedLayer, match="Why:"):
            run(net, *sampled)
        return
    model = run(net, *sampled)
    ref = reference(net.name)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        rows = param.sqrt_ggn_mc
        assert rows.shape == (MC, ref.N, *param.shape), name
        close(param.diag_ggn_mc_batch, rows.square().sum(0), f"{name}, diag_ggn_mc_batch")
        close(param.diag_ggn_mc, rows.square().sum((0, 1)), f"{name}, diag_ggn_mc")
        expected = ref.kflr(name)
        assert [f.shape for f in param.kfac] == [e.shape for e in expected], f"{name}, kfac"
        if len(expected) == 2:
            k = 0 if isinstance(model.get_submodule(name.rpartition(".")[0]), TimesWeight) else 1
            close(param.kfac[k], expected[k], f"{name}, kfac A")
        else:
            gram = rows.flatten(2).flatten(0, 1)
            close(param.kfac[0], gram.T @ gram, f"{name}, kfac G")


MEANS = [n for n in NETWORKS if n.name in {"logistic", "mlp-sum-mse", "mlp-bce", "cnn", "deconv-positions"}]


@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in MEANS])
def test_sampled_means_are_exact(net: Network) -> None:
    """With many samples the sampled GGN is the exact one, sample by sample."""
    draws = 4000
    model = run(net, E.BatchDiagGGNMC(draws), E.DiagGGNMC(draws), E.KFAC(draws))
    ref = reference(net.name)
    for name, param in model.named_parameters():
        pairs = [
            (param.diag_ggn_mc, ref.diag_ggn(name)),
            (param.diag_ggn_mc_batch, ref.diag_ggn_batch(name)),
            (param.kfac[0], ref.kflr(name)[0]),
        ]
        for found, expected in pairs:
            error = (found - expected).norm() / expected.norm()
            assert error < 0.08, f"{name}: relative error {error:.3f}"


@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in MEANS])
def test_same_seed_same_draw(net: Network) -> None:
    first, again = (run(net, E.DiagGGNMC(1)) for _ in range(2))
    for p, q in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.diag_ggn_mc, q.diag_ggn_mc)
