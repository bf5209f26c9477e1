"""Cross-entropy of a softmax: the loss whose Hessian couples the classes of one position."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bpk.jacobians.core.call import Call, once
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.numeric import is_differentiated, safe_sqrt, wide
from bpk.jacobians.losses.loss import Loss

FEW_CLASSES = 16
"""Up to so many classes, a softmax of many rows takes less time with classes in front."""


def _grid(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Index tensors of the last two axes of `[K, N, C]`."""
    n, c = (torch.arange(size, device=rows.device) for size in rows.shape[1:])
    return n[:, None], c


def counted(call: Call, weight: Tensor | None) -> Tensor:
    """The weight of every target `[N, *d]` that is a class; 0 where it is ignored."""
    target = call.inputs[1].long()
    counts = target != call.options.ignore_index
    if weight is None:
        return counts
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0.0)


def divisor(call: Call) -> Tensor | int:
    """By what the mean divides: the summed weights of the targets that count, or the number of positions."""
    x, target = call.inputs[:2]
    return x.numel() // x.shape[1] if target.shape == x.shape else counted(call, call.options.weight).sum()


def ignores_none(call: Call) -> bool:
    """Whether it is plain that all targets count: ignored ones are negative, as they are by default, and none is.

    A GPU is not waited for, to look at them.
    """
    x, target = call.inputs[:2]
    if call.options.ignore_index >= 0 or target.shape == x.shape or is_transformed():
        return False
    return target.device.type == "cpu" and bool(target.numel()) and int(target.min()) >= 0


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities; of many samples with few classes on a processor with all samples of a class side by side."""
    n, classes = logits.shape[:2]
    if logits.dim() == 2 and classes <= FEW_CLASSES and n > 2 * FEW_CLASSES and logits.device.type == "cpu":
        return functional.log_softmax(logits.T, 0).T.contiguous()
    return functional.log_softmax(logits, 1)


def behind_classes(prediction: Tensor) -> tuple[int, ...]:
    """The axes of positions of a prediction `[N, C, *d]`."""
    return tuple(range(2, prediction.dim()))


def draw(p: Tensor, count: int) -> Tensor:
    """Classes `[R, count]`, drawn with probabilities `[R, C]`; rows with NaN stop neither the others nor the draw.

    On processors `multinomial` takes ten times as long: it draws a number for each class. The largest that is
    drawn there is `1 - 2^-53`, and any total times this is less than the total: no class of probability 0 is hit.
    """
    if p.device.type != "cpu":  # there, sums one after the other are not deterministic
        return torch.where(p.isfinite().all(1, keepdim=True), p, 1.0).multinomial(count, replacement=True)
    upto = p.cumsum(1, dtype=torch.float64)
    below = torch.rand(len(p), count, dtype=torch.float64, device="cpu") * upto[:, -1:]
    return torch.searchsorted(upto, below, right=True).clamp_(max=p.shape[1] - 1)


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of logits `[N, C, *d]`, with all options of `torch.nn.CrossEntropyLoss`.

    At every position `H = a (diag(p) - p p^T)` with `p = softmax(logits)`. The weight `a = sum_c w_c t_c / divisor`
    has class weights `w` and the (smoothed) target distribution `t`, and is 0 where the target is ignored. The mean
    divides by the summed weights of the targets that count, or by the number of positions for probability targets.
    Where all targets are ignored, the mean is NaN, and its derivatives are zero (those of torch, too).

    The columns are `sqrt(a p_c) (e_c - p)`. With extra axes there is one set per position, `K = C prod(d)`,
    ordered like the entries of a prediction, each zero at all other positions.
    """

    least_axes = 2

    def divides_by(self, call: Call) -> Tensor | int | None:
        if call.options.reduction == "sum":
            return None
        if call.options.weight is None and ignores_none(call):
            return call.inputs[1].numel()
        return divisor(call)

    def sqrt_hessian(self, call: Call) -> Tensor:
        x = call.inputs[0]
        if x.dim() > 2:
            return next(self.sqrt_hessian_parts(call, x.shape[1:].numel()))
        return self.sqrt_hessian_by_position(call)

    def bends_down(self, call: Call) -> bool:
        """Weights are those of classes, or of a policy gradient: probabilities of targets, times an advantage."""
        if call.options.weight is None and call.inputs[1].shape != call.inputs[0].shape:
            return False
        return bool((self._softmax(call)[1] < 0).any())

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        if not self.bends_down(call):
            return super().hessian_columns(call)
        x, weight = call.inputs[0], self._softmax(call)[1]
        columns = torch.cat(list(self._dense_parts(call, x.shape[1:].numel(), weight.abs())))
        return columns, weight.sign().T.repeat(x.shape[1], 1).to(x.dtype)

    def sqrt_hessian_parts(self, call: Call, columns: int) -> Iterator[Tensor]:
        if call.inputs[0].dim() == 2:
            whole = self.sqrt_hessian(call)
            yield from whole.split(columns) if columns < len(whole) else (whole,)
            return
        yield from self._dense_parts(call, columns)

    def _dense_parts(self, call: Call, columns: int, weight: Tensor | None = None) -> Iterator[Tensor]:
        """Columns of one position each, so many at a time (of other weights than the call's)."""
        x = call.inputs[0]
        of_position = self._position_columns(call, weight)  # [C, N, C, P]
        positions = of_position.shape[3]
        for numbers in torch.arange(x.shape[1:].numel(), device=x.device).split(columns):
            c, p = numbers // positions, numbers % positions
            own = of_position[c, :, :, p]  # [K, N, C]
            part = own.new_zeros(len(numbers), *of_position.shape[1:])
            count = torch.arange(len(numbers), device=x.device)
            part = part.index_put((count[:, None, None], *_grid(own), p[:, None, None]), own)
            yield part.reshape(len(numbers), *x.shape).to(x.dtype)

    def hessian_diag(self, call: Call) -> Tensor:
        log_p, weight = self._softmax(call)  # p (1 - p), right also where p is close to 1
        return (-log_p.exp() * log_p.expm1() * weight[:, None]).reshape(call.inputs[0].shape)

    def positions(self, prediction: Tensor) -> tuple[int, ...]:
        return behind_classes(prediction)

    def sqrt_hessian_by_position(self, call: Call) -> Tensor:
        x = call.inputs[0]
        return self._position_columns(call).reshape(x.shape[1], *x.shape).to(x.dtype)

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        x = call.inputs[0]
        log_p, weight = self._softmax(call)
        p = log_p.exp()
        n, classes, positions = p.shape
        drawn = draw(p.detach().transpose(1, 2).reshape(-1, classes), mc_samples)
        hot = drawn.reshape(n, positions, mc_samples).permute(2, 0, 1)[:, :, None]  # [M, N, 1, P]
        scale = safe_sqrt(weight if mc_samples == 1 else weight / mc_samples)[:, None]
        score = (p * scale).expand(mc_samples, -1, -1, -1).scatter_add(2, hot, -scale.expand(hot.shape))
        return score.reshape(mc_samples, *x.shape).to(x.dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        p, weighted, likely = self._probabilities(call)
        v = mat.reshape(mat.shape[0], *p.shape)
        at = likely.expand(len(v), -1, -1, -1)
        v = v - v.gather(2, at)  # H maps constants to 0, and its product is no small difference of large numbers
        return (weighted * (v - (p * v).sum(2, keepdim=True))).reshape(mat.shape).to(mat.dtype)

    def sum_hessian(self, call: Call) -> Tensor:
        x = call.inputs[0]
        log_p, weight = self._softmax(call)
        p = log_p.exp()
        coupled = (p * weight[:, None]).permute(2, 1, 0) @ p.permute(2, 0, 1)  # [P, C, C]
        coupled = coupled.tril(-1) + coupled.triu(1)
        blocks = coupled.sum(2).diag_embed() - coupled  # rows sum to 0: p (1 - p), right also where p is close to 1
        if len(blocks) == 1:
            return blocks[0].to(x.dtype)
        size = x.shape[1:].numel()
        return blocks.permute(1, 2, 0).diag_embed().transpose(1, 2).reshape(size, size).to(x.dtype)

    def _position_columns(self, call: Call, weight: Tensor | None = None) -> Tensor:
        """`[C, N, C, P]`: column `c` at every position (of other weights `[N, P]` than the call's)."""
        log_p, own = self._softmax(call)
        weight = own if weight is None else weight
        if not is_differentiated():
            negative = log_p.div(2).exp_().mul_(weight.sqrt().neg_().unsqueeze(1))
            columns = negative.transpose(0, 1).unsqueeze(2) * log_p.exp()
            own = log_p.expm1().mul_(negative)  # root (1 - p), right where p is close to 1
            columns.diagonal(dim1=0, dim2=2).copy_(own.transpose(1, 2))
            return columns
        root = (log_p / 2).exp() * safe_sqrt(weight)[:, None]  # exp(log_p / 2) has a derivative also where p is 0
        eye = torch.eye(log_p.shape[1], dtype=log_p.dtype, device=log_p.device)
        return (eye[:, None, :, None] - log_p.exp()) * root.transpose(0, 1)[:, :, None]

    @once
    def _probabilities(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities `p` `[N, C, P]`, the same times the weights, and the likeliest classes `[N, 1, P]`."""
        log_p, weight = self._softmax(call)
        p = log_p.exp()
        return p, p * weight[:, None], p.argmax(1, keepdim=True)

    @once
    def _softmax(self, call: Call) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[N, C, P]` and the weights `a` `[N, P]`."""
        logits, target = wide(call.inputs[0]), call.inputs[1]
        log_p = log_softmax(logits).reshape(*logits.shape[:2], logits.shape[2:].numel())
        n, classes, positions = log_p.shape
        class_weight = call.options.weight
        smoothing = call.options.label_smoothing
        if class_weight is None and target.shape != logits.shape:  # whatever the smoothed target is, it sums to one
            mean = call.options.reduction == "mean"
            if ignores_none(call):
                return log_p, log_p.new_full((n, positions), 1 / target.numel() if mean else 1.0)
            counts = (target.long() != call.options.ignore_index).reshape(n, positions)
            if not mean:
                return log_p, counts.to(log_p.dtype)
            return log_p, counts / counts.sum(dtype=log_p.dtype).clamp_(min=1)
        w = log_p.new_ones(classes) if class_weight is None else class_weight.to(log_p)
        if target.shape == logits.shape:  # a distribution over classes at every position
            t = target.to(log_p.dtype).reshape(log_p.shape)
            weight = torch.einsum("ncp,c->np", t * (1 - smoothing) + smoothing / classes, w)
            total: Tensor | int = n * positions
        else:
            counts = (target.long() != call.options.ignore_index).reshape(n, positions)
            of_target = counted(call, w).reshape(n, positions)
            weight = (1 - smoothing) * of_target + smoothing * w.mean() * counts
            total = torch.where(counts.any(), of_target.sum(), 1.0)
        return log_p, weight / total if call.options.reduction == "mean" else weight
