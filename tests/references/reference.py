"""What every quantity is, by its definition and with plain autograd (float64, loops; nothing of `bpk`).

A `Reference` evaluates a copy of the model once. The share of sample `n` is the whole batch's loss where only
the prediction of sample `n` is attached to the graph: its gradient is exact for every loss and every divisor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.references import attention, recurrence
from tests.references.chain import Chain, ChainOfBatch, once
from tests.references.kronecker import KRONECKER, gradients, in_order, input_factor, jacobian, of_bias
from tests.references.weight_norm import WrittenOut

LossOf = Callable[[Tensor], Tensor]


def hard_sigmoid(module: nn.Module, x: Tensor) -> Tensor:
    """The same function from operations that can be differentiated twice."""
    return torch.clamp(x / 6 + 0.5, 0, 1)


def prelu(module: nn.PReLU, x: Tensor) -> Tensor:
    """The same function with one slope at zero: torch takes that of the other side for second derivatives."""
    weight = module.weight if x.dim() < 2 else module.weight.reshape(1, -1, *[1] * (x.dim() - 2))
    return torch.where(x > 0, x, weight * x)


def group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """The same function; torch's second derivative ends the process where channels are last in memory, and one."""
    x = x.clone(memory_format=torch.contiguous_format)
    return F.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


def channel_shuffle(module: nn.ChannelShuffle, x: Tensor) -> Tensor:
    """The same function; on GPUs, torch's own takes no gradient with gaps in memory."""
    return x.unflatten(1, (module.groups, -1)).transpose(1, 2).flatten(1, 2)


def embedding_bag(
    module: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """Bag after bag, from operations that can be differentiated twice."""
    if offsets is not None and offsets.is_floating_point():  # two inputs, in order
        offsets, per_sample_weights = None, offsets
    weights = torch.ones_like(tokens, dtype=module.weight.dtype) if per_sample_weights is None else per_sample_weights
    if offsets is not None:
        cuts = offsets[1:-1] if module.include_last_offset else offsets[1:]
        bags = list(zip(tokens.tensor_split(cuts.tolist()), weights.tensor_split(cuts.tolist()), strict=True))
    else:
        bags = list(zip(tokens, weights, strict=True))
    reduce: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda rows: rows.sum(0),
        "mean": lambda rows: rows.mean(0),
        "max": lambda rows: rows.amax(0),
    }
    out = []
    for bag, factors in bags:
        rows = [module.weight[k] * f for k, f in zip(bag.tolist(), factors, strict=True) if k != module.padding_idx]
        out.append(reduce[module.mode](torch.stack(rows)) if rows else torch.zeros_like(module.weight[0]))
    return torch.stack(out)


SUBSTITUTES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.ChannelShuffle: channel_shuffle,
    nn.Hardsigmoid: hard_sigmoid,
    nn.EmbeddingBag: embedding_bag,
    nn.GroupNorm: group_norm,
    nn.PReLU: prelu,
}
"""Layers of torch without a second derivative, or with another one than their own gradient has."""


@dataclass
class LayerCall:
    """One call of a layer that has Kronecker factors."""

    module: Any
    inputs: tuple[Tensor, ...]
    output: Tensor


BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
BY_ENTRY = (
    *(nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss),
    *(nn.MultiLabelSoftMarginLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.KLDivLoss),
)
"""Losses that add up a term for each position: of a prediction `[N, C, *d]`, or `[N, *d, D]`."""


class Reference:
    """All quantities of `loss_of(model(*inputs))`, per named parameter."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        loss_of: LossOf,
        seed: int = 0,
        samples: int | None = None,
        loss: type[nn.Module] = nn.Module,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.trained = [name for name, p in self.model.named_parameters() if p.requires_grad]  # biases are added below
        for module in self.model.modules():
            if type(module) in SUBSTITUTES:
                module.forward = partial(SUBSTITUTES[type(module)], module)
        self.maps: list[nn.Linear] = []  # one for each weight of a recurrent layer
        for module in self.model.modules():
            if isinstance(module, recurrence.RECURRENT):
                maps = recurrence.maps_of(module)
                module.forward = partial(recurrence.unrolled, module, maps)
                self.maps.extend(maps.values())
        self.attention: list[attention.AttentionCall] = []
        watched = attention.watch(self.model, self.attention)
        self.loss_of = loss_of
        self.loss = loss
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.calls: list[LayerCall] = []
        hooks = [
            m.register_forward_hook(self._see, with_kwargs=True)
            for m in (*self.model.modules(), *self.maps)
            if isinstance(m, KRONECKER)
        ]
        self.seed = seed
        torch.manual_seed(seed)
        self.inputs = tuple(x.detach() for x in inputs)
        with sdpa_kernel(SDPBackend.MATH), WrittenOut():  # what can be differentiated twice
            self.pred = self.model(*[x.clone() for x in self.inputs])
        for hook in (*hooks, *watched):
            hook.remove()
        self.N = self.inputs[0].shape[0] if samples is None else samples
        self.D = self.pred.numel() // self.N

    def _see(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        self.calls.append(LayerCall(module, tuple(x.detach() for x in (*args, *kwargs.values())), output))
        return output.clone()  # a layer that works in place on it leaves `output` as it was

    # ---- first order -----------------------------------------------------------------------------
    def share(self, n: int) -> Tensor:
        """The loss, attached to the prediction of sample `n` only."""
        attached = torch.zeros(self.N, self.D, dtype=torch.bool)
        attached[n] = True
        return self.loss_of(torch.where(attached.reshape(self.pred.shape), self.pred, self.pred.detach()))

    @cached_property
    def _grad_batch(self) -> dict[str, Tensor]:
        if mixes_samples(self.model):
            return layer_by_layer(self)
        rows = [gradients(self.share(n), list(self.params.values())) for n in range(self.N)]
        return {name: torch.stack([r[i] for r in rows]) for i, name in enumerate(self.params)}

    def grad_batch(self, name: str) -> Tensor:
        return self._grad_batch[name]

    def grad(self, name: str) -> Tensor:
        return self._grad_batch[name].sum(0)

    def batch_l2(self, name: str) -> Tensor:
        return self._grad_batch[name].reshape(self.N, -1).square().sum(1)

    # ---- token by token --------------------------------------------------------------------------
    @cached_property
    def tokens(self) -> Tensor:
        """`[T, *prediction]`: which entries of the prediction belong to a token of their sample."""
        shape, dims = self.pred.shape, self.pred.dim()
        axes = range(2, dims) if self.loss in BY_CLASS else range(1, dims - 1) if self.loss in BY_ENTRY else ()
        sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
        number = torch.arange(math.prod(sizes)).reshape(sizes).expand(shape)
        row = torch.arange(len(self.pred)) % (len(self.pred) // self.N)
        number = number + math.prod(sizes) * row.reshape(-1, *[1] * (dims - 1))
        return torch.arange(int(number.max()) + 1).reshape(-1, *[1] * dims) == number

    @cached_property
    def _token_gradients(self) -> dict[str, Tensor]:
        rows = []
        for n in range(self.N):
            mine = torch.zeros(self.N, self.D, dtype=torch.bool)
            mine[n] = True
            for token in self.tokens:
                attached = torch.where(token & mine.reshape(self.pred.shape), self.pred, self.pred.detach())
                rows.append(gradients(self.loss_of(attached), list(self.params.values())))
        found = {name: torch.stack([r[i] for r in rows]) for i, name in enumerate(self.params)}
        return {name: g.reshape(self.N, -1, self.params[name].numel()) for name, g in found.items()}

    def token_gradients(self, name: str) -> Tensor:
        """`[N, T, P]`: the gradient of each token's term of the loss."""
        return self._token_gradients[name]

    @once
    def token_ggn_diagonals(self, name: str) -> Tensor:
        """`[N, T, P]`: the diagonal of the GGN of each term."""
        jac = self._jacobians[0][name]
        each = [jac * token.reshape(self.N, self.D, 1) for token in self.tokens]
        return torch.stack([torch.einsum("ndp,nde,nep->np", j, self.loss_hessian, j) for j in each], 1)

    def sum_grad_squared(self, name: str) -> Tensor:
        return self._grad_batch[name].square().sum(0)

    def variance(self, name: str) -> Tensor:
        g = self._grad_batch[name]
        return g.square().sum(0) / self.N - (g.sum(0) / self.N).square()

    # ---- generalized Gauss-Newton ----------------------------------------------------------------
    @cached_property
    def loss_hessian(self) -> Tensor:
        """`[N, D, D]`: the loss Hessian with respect to each sample's prediction."""

        def flat_loss(flat: Tensor) -> Tensor:
            return self.loss_of(flat.reshape(self.pred.shape))

        full = torch.autograd.functional.hessian(flat_loss, self.pred.detach().flatten())
        blocks = full.reshape(self.N, self.D, self.N, self.D)
        return torch.stack([blocks[n, :, n] for n in range(self.N)])

    @cached_property
    def _jacobians(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """`[N, D, P]` for parameters, and `[N, D, D_out]` for the outputs of layers with Kronecker factors."""
        wrt = [*self.params.values(), *[call.output for call in self.calls if call.output.requires_grad]]
        found, k = jacobian(self.pred, wrt), len(self.params)
        jac_params = {name: found[i].reshape(self.N, self.D, -1) for i, name in enumerate(self.params)}
        jac_outputs = []
        for i in range(k, len(wrt)):
            if len(wrt[i]) != self.N:  # a layer without a batch axis (an embedding of positions)
                jac_outputs.append(torch.empty(0))
                continue
            full = found[i].reshape(self.N, self.D, self.N, -1)
            jac_outputs.append(torch.stack([full[n, :, n] for n in range(self.N)]))
        return jac_params, jac_outputs

    def jacobian_squares(self, name: str) -> Tensor:
        """`[N, P]`: the diagonal of `J_n^T J_n`."""
        return self._jacobians[0][name].square().sum(1)

    def output_jacobian_squares(self, name: str) -> Tensor:
        """`[C, P]`: squared entries of the Jacobian of each output, at each row of a sample, summed over samples."""
        jac, rows = self._jacobians[0][name], len(self.pred) // self.N
        return jac.unflatten(1, (rows, -1)).transpose(1, 2).flatten(1, 2).square().sum(0)

    def ggn_batch(self, name: str) -> Tensor:
        """`[N, P, P]`: the block of every sample."""
        jac = self._jacobians[0][name]
        return jac.transpose(1, 2) @ self.loss_hessian @ jac

    def ggn(self, name: str) -> Tensor:
        return self.ggn_batch(name).sum(0)

    def diag_ggn_batch(self, name: str) -> Tensor:
        return self.ggn_batch(name).diagonal(dim1=1, dim2=2).reshape(self.N, *self.params[name].shape)

    def diag_ggn(self, name: str) -> Tensor:
        return self.diag_ggn_batch(name).sum(0)

    # ---- Hessian ---------------------------------------------------------------------------------
    @cached_property
    def _hessian_batch(self) -> dict[str, Tensor]:
        params = list(self.params.values())
        blocks: dict[str, list[Tensor]] = {name: [] for name in self.params}
        for n in range(self.N):
            grads = gradients(self.share(n), params, create_graph=True)
            for (name, p), g in zip(self.params.items(), grads, strict=True):
                blocks[name].append(jacobian(g, [p])[0].reshape(p.numel(), p.numel()))
        return {name: torch.stack(b) for name, b in blocks.items()}

    def hessian_batch(self, name: str) -> Tensor:
        """`[N, P, P]`: the block of every sample."""
        return self._hessian_batch[name]

    def hessian(self, name: str) -> Tensor:
        return self._hessian_batch[name].sum(0)

    def diag_h_batch(self, name: str) -> Tensor:
        return self._hessian_batch[name].diagonal(dim1=1, dim2=2).reshape(self.N, *self.params[name].shape)

    def diag_h(self, name: str) -> Tensor:
        return self.diag_h_batch(name).sum(0)

    # ---- Kronecker factors of the exact GGN ------------------------------------------------------
    @once
    def kflr(self, name: str) -> list[Tensor]:
        """`[G, A]` for the weight of a linear or convolutional layer, `[G]` for everything else.

        `G` is the GGN of a bias added to the output, whether there is one or not. A weight that is used several
        times shares one such bias among its uses, and `A` sums over them.
        """
        of_attention = attention.factors(self, name)
        if of_attention is not None:
            return of_attention
        param, outputs = self.params[name], [call for call in self.calls if call.output.requires_grad]
        uses = [k for k, call in enumerate(outputs) if getattr(call.module, "weight", None) is param]
        uses = [k for k in uses if self.feeds_prediction(outputs[k].output)]
        if not uses:
            return [self.ggn(name)]
        if getattr(outputs[uses[0]].module, "mode", "") == "max":  # a bag whose features see tokens of their own
            return [self.ggn(name)]
        jacs = [
            of_bias(outputs[k].module, self._jacobians[1][k], outputs[k].output.shape, outputs[k].inputs) for k in uses
        ]
        jac = torch.stack(jacs).sum(0)
        factor = (jac.transpose(1, 2) @ self.loss_hessian @ jac).sum(0)
        moment = torch.stack([input_factor(outputs[k].module, outputs[k].inputs) for k in uses]).sum(0)
        return in_order(outputs[uses[0]].module, [factor, moment])

    def feeds_prediction(self, output: Tensor) -> bool:
        """Whether the graph leads from a layer's output to the prediction."""
        return torch.autograd.grad(self.pred.sum(), output, retain_graph=True, allow_unused=True)[0] is not None

    # ---- recursions over a chain of layers -------------------------------------------------------
    @cached_property
    def chain(self) -> Chain:
        """The model layer by layer; only for (nested) `Sequential` models."""
        return ChainOfBatch(self) if mixes_samples(self.model) else Chain(self)


def mixes_samples(model: nn.Module) -> bool:
    """Whether a layer standardises with statistics of the batch."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return any(m.training or m.running_mean is None for m in norms)


def layer_by_layer(ref: Reference) -> dict[str, Tensor]:
    """`[N, *p]`: what row `n` of a layer's output alone contributes to the gradient of the layer's own parameters."""
    outputs: dict[str, Tensor] = {}

    def see(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs[name] = output

    hooks = [m.register_forward_hook(partial(see, name)) for name, m in ref.model.named_modules()]
    loss = ref.loss_of(ref.model(*ref.inputs))
    for hook in hooks:
        hook.remove()
    rows: dict[str, list[Tensor]] = {name: [] for name in ref.params}
    for name, param in ref.params.items():
        output = outputs[name.rpartition(".")[0]]
        share = gradients(loss, [output])[0] * output
        rows[name] = [gradients(share[n].sum(), [param])[0] for n in range(ref.N)]
    return {name: torch.stack(parts) for name, parts in rows.items()}
