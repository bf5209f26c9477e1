"""Some samples, and approximations of shared weights, on networks of the matrix."""

from __future__ import annotations

import pytest
import torch

from bpk import extensions as E
from tests.bpk.test_matrix import MC, NETWORKS, close, reference, run
from tests.models.networks import Network


def test_sampled_weight_factor_is_that_of_the_bias() -> None:
    net = next(n for n in NETWORKS if n.name == "cnn")
    model = run(net, E.KFAC(MC))
    for layer in (model[0], model[6]):
        close(layer.weight.kfac[0], layer.bias.kfac[0], "kfac G")


HAND_MADE = [n for n in NETWORKS if n.name in {"mlp", "cnn", "linear-extra-axis", "reused-layer", "siamese"}]


@pytest.mark.parametrize("subsampling", [[0], [2, 0], [1, 1], [2, 0, 2, 1, 2]], ids=str)
@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in HAND_MADE])
def test_subsampling(net: Network, subsampling: list[int]) -> None:
    """Only the chosen samples, in the order given, as often as they are named; divisors stay the whole batch's."""
    ref = reference(net.name)
    per_sample = {
        "grad_batch": ref.grad_batch,
        "batch_l2": ref.batch_l2,
        "diag_ggn_exact_batch": ref.diag_ggn_batch,
        "diag_h_batch": ref.diag_h_batch,
    }
    model = run(
        net,
        E.BatchGrad(subsampling=subsampling),
        E.BatchL2Grad(subsampling=subsampling),
        E.SumGradSquared(subsampling=subsampling),
        E.DiagGGNExact(subsampling=subsampling),
        E.BatchDiagGGNExact(subsampling=subsampling),
        E.DiagHessian(subsampling=subsampling),
        E.BatchDiagHessian(subsampling=subsampling),
        E.SqrtGGNExact(subsampling=subsampling),
        E.SqrtGGNMC(mc_samples=3, subsampling=subsampling),
        E.GGNMP(subsampling=subsampling),
        E.HMP(subsampling=subsampling),
    )
    for name, param in model.named_parameters():
        for field, of in per_sample.items():
            close(getattr(param, field), of(name)[subsampling], f"{name}.{field}")
        close(param.sum_grad_squared, ref.grad_batch(name)[subsampling].square().sum(0), f"{name}.sum_grad_squared")
        close(param.diag_ggn_exact, ref.diag_ggn_batch(name)[subsampling].sum(0), f"{name}.diag_ggn_exact")
        close(param.diag_h, ref.diag_h_batch(name)[subsampling].sum(0), f"{name}.diag_h")
        rows = param.sqrt_ggn_exact.flatten(2)
        close(torch.einsum("cnp,cnq->npq", rows, rows), ref.ggn_batch(name)[subsampling], f"{name}.sqrt_ggn_exact")
        assert param.sqrt_ggn_mc.shape == (3, len(subsampling), *param.shape)
        vector = torch.randn(1, *param.shape, dtype=torch.float64)
        for field, blocks in (("ggnmp", ref.ggn_batch(name)), ("hmp", ref.hessian_batch(name))):
            expected = (vector.flatten(1) @ blocks[subsampling].sum(0)).reshape(vector.shape)
            close(getattr(param, field)(vector), expected, f"{name}.{field}")


@pytest.mark.parametrize("net", [pytest.param(n, id=str(n)) for n in HAND_MADE])
def test_variance_of_some_samples(net: Network) -> None:
    """Sums run over the chosen samples, divisors stay the whole batch's."""
    ref, chosen = reference(net.name), [2, 0]
    model = run(net, E.Variance(subsampling=chosen))
    for name, param in model.named_parameters():
        rows = ref.grad_batch(name)[chosen]
        expected = rows.square().sum(0) / ref.N - (rows.sum(0) / ref.N).square()
        close(param.variance, expected, name)


def test_family_of_kronecker_factors() -> None:
    """`HBP` with the right strategies is KFLR, KFRA and KFAC."""
    from bpk.extensions.secondorder.strategies import BackpropStrategy, LossHessianStrategy

    net = next(n for n in NETWORKS if n.name == "cnn")
    exact = E.HBP(loss_hessian_strategy=LossHessianStrategy.EXACT)
    averaged = E.HBP(
        loss_hessian_strategy=LossHessianStrategy.SUM,
        backprop_strategy=BackpropStrategy.BATCH_AVERAGE,
        savefield="averaged",
    )
    model = run(net, exact, averaged, E.KFLR(), E.KFRA())
    for name, param in model.named_parameters():
        for found, expected in ((param.hbp, param.kflr), (param.averaged, param.kfra)):
            assert len(found) == len(expected)
            for f, e in zip(found, expected, strict=True):
                close(f, e, name)
    sampled = run(net, E.HBP(loss_hessian_strategy=LossHessianStrategy.SAMPLING, mc_samples=MC), E.KFAC(MC))
    for name, param in sampled.named_parameters():
        close(param.hbp[0], param.kfac[0], name)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_approximations_agree_without_weight_sharing(name: str) -> None:
    net = next(n for n in NETWORKS if n.name == name)
    runs = [run(net, E.KFLR(approximation=a)) for a in ("default", "expand", "reduce")]
    for params in zip(*[m.parameters() for m in runs], strict=True):
        for factor in range(len(params[0].kflr)):
            for other in params[1:]:
                close(other.kflr[factor], params[0].kflr[factor], "approximation")


@pytest.mark.parametrize("name", ["linear-extra-axis", "cnn"])
def test_approximations_have_the_same_shapes(name: str) -> None:
    net = next(n for n in NETWORKS if n.name == name)
    runs = [run(net, E.KFAC(approximation=a)) for a in ("default", "expand", "reduce")]
    for params in zip(*[m.parameters() for m in runs], strict=True):
        shapes = [[f.shape for f in p.kfac] for p in params]
        assert shapes[0] == shapes[1] == shapes[2]
