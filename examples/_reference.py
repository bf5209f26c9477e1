"""Plain autograd, no `bpk`: what each quantity must be, computed the slow and obvious way in float64.

One function a quantity: it receives a `Net` and names a parameter or a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy, one_hot, unfold


@dataclass
class Net:
    """A copy of the trained network in float64, with one batch."""

    model: nn.Sequential
    x: Tensor
    y: Tensor
    kfra: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    @property
    def n(self) -> int:
        """The batch size: the loss is a mean, so everything carries a factor `1 / n`."""
        return len(self.x)

    def gradient(self, sample: int, label: int) -> dict[str, Tensor]:
        """The gradient of one sample's loss, by a backward pass of its own."""
        loss = cross_entropy(self.model(self.x[sample : sample + 1]), torch.tensor([label]))
        grads = torch.autograd.grad(loss, list(self.params.values()))
        return dict(zip(self.params, grads, strict=True))

    @cached_property
    def individual(self) -> dict[str, Tensor]:
        """`[N, *p]`: the individual gradients, scaled as the mean loss scales them."""
        rows = [self.gradient(i, int(self.y[i])) for i in range(self.n)]
        return {name: torch.stack([r[name] for r in rows]) / self.n for name in self.params}

    @cached_property
    def jacobian(self) -> dict[str, Tensor]:
        """`[N, C, *p]`: the Jacobian of the network's output."""

        def outputs(params: dict[str, Tensor]) -> Tensor:
            return functional_call(self.model, params, (self.x,))

        return jacrev(outputs)({name: p.detach() for name, p in self.params.items()})

    @cached_property
    def probabilities(self) -> Tensor:
        """`[N, C]`."""
        return self.model(self.x).softmax(1).detach()

    @cached_property
    def loss_hessian(self) -> Tensor:
        """`[N, C, C]`: of each sample's share in the mean loss, `(diag(p) - p pᵀ) / N`."""
        p = self.probabilities
        return (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / self.n

    @cached_property
    def label_gradients(self) -> dict[str, Tensor]:
        """`[N, C, *p]`: the gradient that each sample would have, were its label each of the classes."""
        p = self.probabilities
        towards = p[:, None, :] - one_hot(torch.arange(p.shape[1]), p.shape[1])  # [N, label, C]
        return {name: torch.einsum("nlc,nc...->nl...", towards, jac) for name, jac in self.jacobian.items()}

    def activation(self, layer: int) -> Tensor:
        """The input of layer `layer`."""
        return self.model[:layer](self.x)


def layer_of(name: str) -> int:
    """The position in the network of the layer that owns a parameter (`'3.weight'` is owned by layer 3)."""
    return int(name.split(".")[0])


# ---- GGN and Hessian ------------------------------------------------------------------------------------
def ggn_diagonal(net: Net, name: str) -> Tensor:
    """`[N, *p]`: the diagonal of `Jᵀ H_loss J` for each sample."""
    jac = net.jacobian[name]
    return torch.einsum("ncd,nc...,nd...->n...", net.loss_hessian, jac, jac)


def ggn_product(net: Net, name: str, vector: Tensor) -> Tensor:
    """`Jᵀ H_loss J v`."""
    jac = net.jacobian[name].flatten(2)
    return torch.einsum("ncp,ncd,ndq,q->p", jac, net.loss_hessian, jac, vector.flatten()).reshape(vector.shape)


def hessian_diagonal(net: Net, name: str, samples: list[int], entries: Tensor) -> Tensor:
    """Entries of the diagonal of the samples' summed Hessian: one more backward pass for each."""
    p = net.params[name]
    loss = cross_entropy(net.model(net.x[samples]), net.y[samples], reduction="sum") / net.n
    (grad,) = torch.autograd.grad(loss, p, create_graph=True)
    flat = grad.flatten()
    return torch.stack([torch.autograd.grad(flat[i], p, retain_graph=True)[0].flatten()[i] for i in entries.tolist()])


def hessian_product(net: Net, name: str, vector: Tensor) -> Tensor:
    """`H v` by differentiating the gradient once more."""
    p = net.params[name]
    (grad,) = torch.autograd.grad(cross_entropy(net.model(net.x), net.y), p, create_graph=True)
    return torch.autograd.grad(grad, p, vector)[0]


def positive_product(net: Net, name: str, vector: Tensor) -> Tensor:
    """The positive-curvature product: the GGN plus the clipped second derivative of every activation.

    For this network: `G v + sum_l J_lᵀ max(0, diag(f_l''(z_l) g_l)) J_l v`, with `z_l`, `g_l` the input
    of activation `l` and the loss's gradient with respect to its output.
    """
    total = ggn_product(net, name, vector)
    for position, layer in enumerate(net.model):
        if isinstance(layer, nn.Tanh) and position > layer_of(name):
            total = total + _activation_term(net, name, vector, position)
    return total


def _activation_term(net: Net, name: str, vector: Tensor, position: int) -> Tensor:
    below, above = net.model[:position], net.model[position + 1 :]
    z = below(net.x)
    t = z.tanh().detach().requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(above(t), net.y), t)
    curvature = (-2 * t * (1 - t**2) * g).clamp(min=0).detach()

    def inputs(p: Tensor) -> Tensor:
        return functional_call(below, {name: p}, (net.x,))

    p = net.params[name].detach()
    moved = torch.func.jvp(inputs, (p,), (vector,))[1]
    return torch.func.vjp(inputs, p)[1](curvature * moved)[0]


# ---- Kronecker factors ----------------------------------------------------------------------------------
def kron_input(net: Net, layer: int) -> Tensor:
    """`A = sum a aᵀ / N` over samples and positions; a convolution's `a` are the unfolded patches."""
    module, a = net.model[layer], net.activation(layer)
    if isinstance(module, nn.Conv2d):
        a = unfold(a, module.kernel_size, padding=module.padding).transpose(1, 2).flatten(0, 1)
    return a.T @ a / net.n


def kflr_output(net: Net, layer: int) -> Tensor:
    """`G`: the exact GGN of the layer's bias."""
    jac = net.jacobian[f"{layer}.bias"]
    return torch.einsum("nci,ncd,ndj->ij", jac, net.loss_hessian, jac)


def kfac_output(net: Net, layer: int, labels: Tensor) -> Tensor:
    """`G` from gradients of the bias for sampled labels `[M, N]`."""
    g = net.label_gradients[f"{layer}.bias"][torch.arange(net.n), labels]
    return torch.einsum("mni,mnj->ij", g, g) / (net.n * len(labels))


def kfra_output(net: Net, layer: int) -> Tensor:
    """`G` by KFRA's recursion: `M <- mean_n Jₙᵀ M Jₙ` from the loss down to the layer's bias."""
    matrix = _kfra(net, layer)

    def of_bias(bias: Tensor) -> Tensor:
        return functional_call(net.model[layer], {"bias": bias}, (net.activation(layer)[:1],)).flatten()

    jac = jacrev(of_bias)(net.params[f"{layer}.bias"].detach())
    return jac.T @ matrix @ jac


def _kfra(net: Net, layer: int) -> Tensor:
    """The averaged GGN with respect to the output of a layer."""
    if layer == len(net.model) - 1:
        return net.loss_hessian.sum(0)
    if layer not in net.kfra:
        net.kfra[layer] = _congruence(net.model[layer + 1], net.activation(layer + 1).detach(), _kfra(net, layer + 1))
    return net.kfra[layer]


def _congruence(module: nn.Module, inputs: Tensor, matrix: Tensor) -> Tensor:
    """`mean_n Jₙᵀ M Jₙ`; for an activation, whose Jacobian is diagonal, `M * mean_n sₙ sₙᵀ` with its slopes."""
    if isinstance(module, nn.ReLU | nn.Tanh):
        x = inputs.clone().requires_grad_()
        slopes = torch.autograd.grad(module(x).sum(), x)[0].flatten(1)
        return matrix * (slopes.T @ slopes / len(inputs))

    def of_one_sample(a: Tensor) -> Tensor:
        return module(a[None]).flatten()

    total = torch.zeros((), dtype=inputs.dtype)
    for a in inputs:
        jac = jacrev(of_one_sample)(a).flatten(1)
        total = total + jac.T @ matrix @ jac
    return total / len(inputs)
