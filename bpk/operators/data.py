"""A model, a loss and data: the batches, how they are weighted, and whether products with them are defined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.context import disable
from bpk.operators.forward import Forward, ForwardOf, example, kind_of, refusal, there
from bpk.operators.kernels import exact_kernels
from bpk.operators.loss_at import LossAt

Loader = Iterable[Any] | tuple[Any, ...] | Mapping[str, Any]
"""Batches, in an order that may change from pass to pass; or one batch, as a tuple or a mapping."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

HEAVY = 2**18
"""Parameters from which on several second derivatives take longer together than one by one (measured on processors)."""


class Problem:
    """What operators are made of.

    Args:
        model: Called as `model(inputs)`, or as `forward` says; gives one tensor.
        loss_fn: Called as `loss_fn(output, targets)`, or `None`.
        loader: The batches; or one, as a tuple or a mapping.
        name: Of the operator, for messages.
        check_deterministic: Whether to see that model and loader give the same twice.
        forward: Gives outputs and targets of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module | None,
        loader: Loader,
        name: str,
        check_deterministic: bool,
        forward: ForwardOf | None = None,
    ) -> None:
        self.model, self.loss_fn, self.name = model, loss_fn, name
        if not isinstance(model, nn.Module):
            why = "its parameters are the columns"
            raise self.refused(f"{kind_of(model)} as model, which is no module", why, "pass an nn.Module")
        if loss_fn is None and name != "Jacobian":
            raise self.refused("no loss", "the curvature is that of one", "pass nn.CrossEntropyLoss()")
        self.forward = Forward(model, forward, name, loss_fn is not None)
        if not isinstance(loader, Iterable) or isinstance(loader, Tensor):
            why = "it gives the batches"
            do = "pass a DataLoader, a list of batches, or one batch (inputs, targets)"
            raise self.refused(f"{kind_of(loader)} as loader", why, do)
        self.loader: Iterable[Any] = [loader] if self.is_batch(loader) else loader
        self.single = isinstance(self.loader, Sequence) and len(self.loader) == 1
        self.params = {key: p for key, p in model.named_parameters() if p.requires_grad}
        if loss_fn is not None and not isinstance(loss_fn, nn.Module):
            raise self.refused("a loss that is no module", "its divisor is read from it", "pass nn.CrossEntropyLoss()")
        if not self.params:
            raise self.refused("a model without trainable parameters", "it has no columns", "unfreeze some")
        if any(p.is_complex() for p in self.params.values()):
            why = "their curvature is linear in real and imaginary parts, and in no complex vectors"
            do = "write them as two real ones (torch.nn.utils.parametrize, torch.complex), or freeze them"
            raise self.refused("complex parameters", why, do)
        if len({(p.dtype, p.device) for p in self.params.values()}) > 1:
            why = "vectors are of one dtype, on one device"
            raise self.refused("parameters of several dtypes or devices", why, "convert the model, or freeze some")
        if isinstance(self.loader, Iterator):
            why = "every product passes over the data once more"
            raise self.refused("an iterator, which can be used once", why, "pass a DataLoader or a list of batches")
        convolves = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
        self.heavy = convolves or sum(p.numel() for p in self.params.values()) >= HEAVY
        first = next(iter(self.params.values()))
        self.dtype, self.device = first.dtype, first.device
        self.checks, self.modes, self.has_graph = check_deterministic, self.modes_now(), False
        if check_deterministic:
            self.check()

    def refused(self, what: str, why: str, do: str) -> ValueError:
        """The error for what no operator can be made of."""
        return refusal(self.name, what, why, do)

    def is_batch(self, loader: Iterable[Any]) -> bool:
        """Whether this is one batch, not several; two tuples are two pairs, though each could be inputs or targets."""
        if not isinstance(loader, tuple):
            return isinstance(loader, Mapping)
        if not self.forward.takes_pairs:
            if any(isinstance(part, Tensor) for part in loader):
                return True
            why, do = "it may be one batch, or several", "pass [batch] for one batch, a list of batches for several"
            raise self.refused("a tuple without a tensor in it, beside forward=", why, do)
        if len(loader) != 2 or all(isinstance(part, tuple) for part in loader):
            return False
        if all(isinstance(part, (tuple, list)) and len(part) == 2 for part in loader):
            why = "it may be one batch (inputs, targets), or two batches that are pairs"  # tuple(loader)
            do = "pass [(inputs, targets)] for one batch, a list of batches for two"
            raise self.refused("a tuple of two pairs, at least one of them a list", why, do)
        return True

    def batches(self) -> Iterator[Any]:
        """The batches, on the model's device."""
        number = -1
        for number, batch in enumerate(self.loader):
            if self.forward.takes_pairs and (not isinstance(batch, (tuple, list)) or len(batch) != 2):
                what = f"{type(batch).__name__} as batch {number}"
                do = f"pass batches of pairs (one batch as a tuple), or {example(self.loss_fn is not None)}"
                raise self.refused(what, "a batch is a pair (inputs, targets) where nothing else is said", do)
            yield there(batch, self.device)
        if number < 0:
            why, do = "a mean over no data is not defined", "pass a DataLoader or a list, not an exhausted iterator"
            raise self.refused("a loader without batches", why, do)

    # ---- is it defined ------------------------------------------------------------------------------
    def modes_now(self) -> list[bool]:
        """Which parts of the model are in training mode."""
        return [module.training for module in self.model.modules()]

    def still(self) -> nn.Module:
        """The model, before each product: of the same parameters, and checked again if its mode was changed."""
        now = dict(self.model.named_parameters())
        here = (self.dtype, self.device, True)
        for name, p in self.params.items():
            if now.get(name) is not p or (p.dtype, p.device, p.requires_grad) != here:
                what = f"a model whose parameter '{name}' was replaced, converted or frozen since"
                raise self.refused(what, "its columns belong to parameters as they were then", "make the operator anew")
        if self.checks and self.modes != self.modes_now():
            self.check()
            self.modes = self.modes_now()
        return self.model

    def check(self) -> None:
        """Refuse what gives another result the second time, and layers that see the batch as a whole."""
        for path, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
                what = f"layer '{path}' ({type(module).__name__}) with the statistics of the batch"
                why = "its outputs depend on how the data is cut into batches, and it changes its buffers"
                raise self.refused(what, why, "call model.eval()")
        before = {key: b.clone() for key, b in self.model.named_buffers()}
        with torch.inference_mode(False), disable(), torch.no_grad(), exact_kernels():
            first, second = self.seen(twice=True), self.seen(twice=False)
        for key, b in self.model.named_buffers():
            if key not in before or b.shape != before[key].shape:
                continue  # a cache that grows with what it has seen (positions): two results were the same with it
            if not same(b, before[key]):
                b.copy_(before[key])
                why = "products would depend on how often they are computed"
                raise self.refused(f"a model whose forward pass changes the buffer '{key}'", why, "call model.eval()")
        if not self.has_graph:
            why, do = "all derivatives are zero", "leave out torch.no_grad() and detach()"
            raise self.refused("a model whose outputs have no graph that leads to trained parameters", why, do)
        if not close(first, second, self.dtype):
            why = f"the sums of outputs and losses over two passes differ ({first.tolist()}, {second.tolist()})"
            do = "turn off random augmentation and drop_last; shuffling alone is fine"
            raise self.refused("a loader that gives other data in its second pass", why, do)

    def seen(self, twice: bool) -> Tensor:
        """Sums over all batches, of squared outputs and of losses; or a refusal of a model that is random."""
        total = torch.zeros(2, dtype=torch.float64, device="cpu")
        for batch in self.batches():
            z, y = self.predict(batch)
            if twice and not self.repeats(batch, z):
                why = "it draws random numbers (dropout), so that no two products belong to the same matrix"
                own = "" if self.forward.takes_pairs else ", and change no tensors of the batch in forward="
                raise self.refused("a model that gives two results for one input", why, f"call model.eval(){own}")
            twice = False
            total[0] += z.double().square().sum().cpu()
            if self.loss_fn is not None:
                loss = LossAt(self.loss_fn, z, y)
                total[1] += loss.value.double().cpu() * (1 if self.single else loss.size.weight(1))
        return total

    def repeats(self, batch: Any, z: Tensor) -> bool:
        """Whether the batch has this output again."""
        again, _ = self.predict(batch)
        scale = float(z.abs().max()) if z.numel() else 0.0
        return again.shape == z.shape and close(z, again, z.dtype, scale)

    def predict(self, batch: Any) -> tuple[Tensor, Any]:
        """Outputs without their graph, which is there meanwhile: a model may ask for gradients itself; and targets."""
        with torch.enable_grad():
            z, y = self.forward(batch)
        self.has_graph |= z.requires_grad
        return z.detach(), y


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same entries, NaN included."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def close(a: Tensor, b: Tensor, dtype: torch.dtype, absolute: float = 0.0) -> bool:
    """Whether two results of computations in this precision are the same up to the order of additions."""
    tolerance = 100 * torch.finfo(dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * absolute, equal_nan=True)
