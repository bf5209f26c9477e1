"""Every extension on a linear model: what each field is, its shape, and a check against autograd.

A linear model with the cross-entropy loss has one Hessian, which is also its generalised Gauss-Newton matrix (GGN).
So one reference serves everything here: products of vectors with each sample's Jacobian, by `torch.func`.

Prints every field with its shapes on weight and bias, and its deviation from the reference, for every extension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import one_hot

import bpk
from _check import agree, needs, shape
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.utils.examples import load_one_batch_mnist


def main() -> None:
    needs("sklearn")  # for its digits, where MNIST is not at hand
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    x, y = load_one_batch_mnist(batch_size=512, download=False)
    n = len(x)
    model = bpk.extend(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    weight, bias = model[1].weight, model[1].bias
    shown: set[type[BackpropExtension]] = set()

    def backward(*extensions: BackpropExtension) -> None:
        loss = loss_fn(model(x), y)
        with bpk.backpack(*extensions):
            loss.backward()
        shown.update(type(extension) for extension in extensions)
        for field in (e.savefield for e in extensions if e.savefield not in FUNCTIONS + FACTORS + LISTS + BASES):
            print(f".{field}: weight {shape(getattr(weight, field))}, bias {shape(getattr(bias, field))}")

    def check(field: str, want: Tensor) -> None:
        """Compare a field of both parameters, side by side along the last axis, with `want`."""
        lead = want.dim() - 1
        got = [getattr(q, field).flatten(lead) for q in (weight, bias)]
        agree(field, torch.cat(got, lead), want)

    # the reference: `rows(v)[n]` is Jₙᵀ vₙ, and the Hessian of one sample's loss is diag(p) - p pᵀ = root rootᵀ
    p = model(x).detach().softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    g = rows(model, x, p - one_hot(y, 10)) / n
    diagonal = sum(rows(model, x, root[:, :, c]).square() for c in range(10)) / n

    print("First order: individual gradients, and what can be known of them without holding them all")
    max_norm, projected = g.norm(dim=1).median().item() * n, E.ProjectedGrad(k=16)
    backward(E.BatchGrad(), E.BatchL2Grad(), E.SumGradSquared(), E.Variance(), E.GradGram(), projected)
    backward(E.WeightedGrad(y == 0), E.ClippedGrad(max_norm))
    check("grad_batch", g)
    agree("batch_l2, summed over both parameters", weight.batch_l2 + bias.batch_l2, g.square().sum(1))
    check("sum_grad_squared", g.square().sum(0))
    check("variance", g.var(0, correction=0))
    agree("grad_gram, summed over both parameters", weight.grad_gram + bias.grad_gram, g @ g.T)
    matrix = projected.whole(weight.shape, x)  # random, and the same for a seed
    agree("projected_grad", weight.projected_grad, g[:, : weight.numel()] @ matrix.T)
    check("weighted_grad", g[y == 0].sum(0))
    check("clipped_grad", g.T @ (max_norm / n / g.norm(dim=1)).clamp(max=1))

    backward(E.AxisGram())
    gradients = g[:, : weight.numel()].view(n, 10, 784)
    print(f".axis_gram: weight {[shape(m) for m in weight.axis_gram]}, bias {[shape(m) for m in bias.axis_gram]}")
    wide = gradients.double()
    agree("axis_gram[0]", weight.axis_gram[0].double(), torch.einsum("noi,npi->op", wide, wide))
    agree("axis_gram[1]", weight.axis_gram[1].double(), torch.einsum("noi,noj->ij", wide, wide))

    print("The outputs' Jacobian: each output depends on its own row of the weight")
    backward(E.DiagJTJExact(), E.DiagJTJMC(), E.OutputDiagJTJExact())
    for field in ("diag_jtj_exact", "diag_jtj_mc"):  # random signs do not matter here
        agree(field, getattr(weight, field), x.flatten(1).square().sum(0).expand(10, 784))
    agree("diag_jtj_exact_output", weight.diag_jtj_exact_output.sum(0), weight.diag_jtj_exact)

    print("Tokens: the terms that the loss adds up for a sample, here one")
    backward(E.TokenGrad(), E.TokenL2Grad(), E.TokenProjectedGrad(k=16))
    agree("grad_token", weight.grad_token, gradients[:, None])
    agree("token_l2", weight.token_l2[:, 0], gradients.flatten(1).square().sum(1))
    agree("projected_grad_token", weight.projected_grad_token[:, 0], gradients.flatten(1) @ matrix.T)
    backward(E.TokenDiagGGNExact(), E.TokenTraceGGNExact())
    agree("diag_ggn_exact_token", weight.diag_ggn_exact_token[:, 0].flatten(1), diagonal[:, : weight.numel()])
    agree("trace_ggn_exact_token", weight.trace_ggn_exact_token[:, 0], diagonal[:, : weight.numel()].sum(1))
    backward(E.TokenDiagGGNMC(), E.TokenTraceGGNMC())
    agree("trace_ggn_mc_token", weight.trace_ggn_mc_token, weight.diag_ggn_mc_token.flatten(2).sum(2))

    print("Diagonals of the GGN and of the Hessian (here the same), of the batch and of each sample")
    backward(E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.BatchDiagHessian())
    for field in ("diag_ggn_exact", "diag_h"):
        check(field, diagonal.sum(0))
        check(f"{field}_batch", diagonal)

    def check_moments(field: str, columns: list[Tensor]) -> None:
        """Hold the basis against the factor A, and moments in it against columns `[N, P]`."""
        left, right = getattr(weight, field).bases
        moments = getattr(weight, field).moments
        print(f".{field}: weight bases {[shape(left), shape(right)]}, moments {shape(moments)}")
        turned = right.T @ x.flatten(1).T @ x.flatten(1) @ right
        agree(f"{field}, A is diagonal in its basis", turned, torch.diag(turned.diagonal()))
        some = torch.randperm(784)[:100]
        matrices = [column[:, : weight.numel()].reshape(n, 10, 784) for column in columns]
        want = sum((left.T @ matrix @ right[:, some]).square().sum(0) for matrix in matrices)
        agree(f"{field}, 1000 moments", moments[:, some], want)

    print("Square roots of the GGN, exact and sampled, and what follows from the same draws")
    backward(E.SqrtGGNExact(), E.SqrtGGNMC(), E.DiagGGNMC(), E.BatchDiagGGNMC(), E.KFAC(), E.EKFAC(), E.GGNGramMC())
    got = torch.cat([weight.sqrt_ggn_exact[:, 0].flatten(1), bias.sqrt_ggn_exact[:, 0]], 1)
    want = torch.cat([rows(model, x[:1], root[:1, :, c]) for c in range(10)]) / n**0.5
    some = torch.randperm(got.shape[1])[:100]
    agree("100 columns of sqrt_ggn_exact times itself, one sample", got.T @ got[:, some], want.T @ want[:, some])
    labels = (p - bias.sqrt_ggn_mc[0] * n**0.5).argmax(1)  # drawn from the prediction: a row is p - e_label
    drawn = rows(model, x, p - one_hot(labels, 10)) / n**0.5
    check("sqrt_ggn_mc", drawn[None])
    check("diag_ggn_mc", drawn.square().sum(0))
    check("diag_ggn_mc_batch", drawn.square())
    agree("kfac[0], the factor G", weight.kfac[0], drawn[:, -10:].T @ drawn[:, -10:])
    agree("ggn_gram_mc, summed over both parameters", weight.ggn_gram_mc + bias.ggn_gram_mc, drawn @ drawn.T)
    check_moments("ekfac", [drawn])

    print("Gram matrix of the exact square root, of some samples: it has the spectrum of their GGN")
    backward(E.GGNGram(subsampling=range(8)))
    columns = torch.cat([rows(model, x[:8], root[:8, :, c]) for c in range(10)]) / n**0.5
    found = torch.linalg.eigvalsh(weight.ggn_gram + bias.ggn_gram)
    agree("eigenvalues of ggn_gram", found, torch.linalg.eigvalsh(columns @ columns.T))

    print("Kronecker factors: kron(G, A) stands for the weight's block, G is the bias's")
    backward(E.KFAC(mc_samples=1), E.KFLR(), E.KFRA())
    for field in FACTORS:
        of_weight, of_bias = getattr(weight, field), getattr(bias, field)
        print(f".{field}: weight {[shape(f) for f in of_weight]}, bias {[shape(f) for f in of_bias]}")
        agree(f"{field}[1], the factor A", of_weight[1], x.flatten(1).T @ x.flatten(1) / n)
        if field != "kfac":  # sampled
            agree(f"{field}[0], the factor G", of_weight[0], (root @ root.mT).mean(0))
            agree(f"{field}[0] of the bias", of_bias[0], (root @ root.mT).mean(0))

    print("Kronecker factors of groups of samples: here of the digits")
    digits = [(y == digit).nonzero().flatten().tolist() for digit in range(10)]
    backward(E.BatchKFLR(digits), E.BatchKFAC(groups=digits))
    for field in ("kflr_batch", "kfac_batch"):
        print(f".{field}: weight {[shape(f) for f in getattr(weight, field)]}")
        zeros = x[y == 0].flatten(1)
        agree(f"{field}[1] of zeros", getattr(weight, field)[1][0], zeros.T @ zeros / len(zeros))
    agree("kflr_batch[0] of zeros", weight.kflr_batch[0][0], (root @ root.mT)[y == 0].sum(0) / n)

    print("Eigenvalue-corrected factors: the GGN's own diagonal in the factors' eigenbasis")
    backward(E.EKFLR())
    check_moments("ekflr", [rows(model, x, root[:, :, c]) / n**0.5 for c in range(10)])

    print("Products with the parameters' blocks of the Hessian, the GGN, and positive-curvature Hessians")
    backward(E.HMP(), E.GGNMP(), E.PCHMP("pchmp_clip", modify="clip"), E.PCHMP("pchmp_abs", modify="abs"))
    vectors = torch.randn(3, *weight.shape)
    moved = torch.stack([jvp(lambda w: x.flatten(1) @ w.T + bias, (weight.detach(),), (v,))[1] for v in vectors])
    curved = torch.einsum("nij,nkj,vnk->vni", root, root, moved) / n  # the loss's Hessian times J v
    want = torch.stack([rows(model, x, u)[:, : weight.numel()].sum(0) for u in curved]).reshape(vectors.shape)
    for field in FUNCTIONS:
        one, three = getattr(weight, field)(vectors[:1]), getattr(weight, field)(vectors)
        print(f".{field}: weight {shape(vectors[:1])} -> {shape(one)}, {shape(vectors)} -> {shape(three)}")
        agree(f"{field} of three vectors", three, want)
    print(f"All {len(shown)} extensions agree with autograd.")


FACTORS = ("kfac", "kflr", "kfra")
LISTS = ("axis_gram", "kfac_batch", "kflr_batch")
BASES = ("ekfac", "ekflr")
FUNCTIONS = ("hmp", "ggnmp", "pchmp_clip", "pchmp_abs")


def rows(model: nn.Module, x: Tensor, vectors: Tensor) -> Tensor:
    """`[N, P]`: each sample's Jacobian, transposed, times its own vector; the weight's entries before the bias's."""

    def along(params: dict[str, Tensor], x: Tensor, v: Tensor) -> Tensor:
        return (functional_call(model, params, (x[None],))[0] * v).sum()

    params = {name: p.detach() for name, p in model.named_parameters()}
    with bpk.disable():
        return torch.cat([r.flatten(1) for r in vmap(grad(along), (None, 0, 0))(params, x, vectors).values()], 1)


if __name__ == "__main__":
    main()
