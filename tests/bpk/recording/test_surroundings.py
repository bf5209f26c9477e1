"""Where `bpk` cannot work, it says so: one sentence with the true reason, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.preconditioners import EKFAC, KFAC, DiagonalGGN
from bpk.preconditioners.base import Preconditioner
from tests.helpers import data, extended, mlp, saved, told
from tests.references.reference import Reference

BOTH = pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact], ids=lambda e: e.__name__)
"""First and second order."""


# ---- the forward pass ----------------------------------------------------------------------------------
class Around(nn.Module):
    """A layer that is called through a function, and one behind it."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.call = nn.Linear(4, 4), nn.Linear(4, 3), call

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.call(self.first, x))


@BOTH
@pytest.mark.parametrize("all_of_it", [False, True])
def test_reentrant_checkpoints(extension: Callable[[], Any], all_of_it: bool) -> None:
    model, loss_fn = extended(Around(lambda m, x: checkpoint(m, x, use_reentrant=not all_of_it)).double())
    x, y = data()
    x.requires_grad_()
    pred = checkpoint(model, x, use_reentrant=True) if all_of_it else model(x)
    with told(RuntimeError, "use_reentrant=True", "starts a backward pass of its own"), bpk.backpack(extension()):
        loss_fn(pred, y).backward()
    assert saved(model) == set()
    loss_fn(model(x), y).backward()


@BOTH
def test_a_reentrant_checkpoint_between_layers(extension: Callable[[], Any]) -> None:
    """torch itself refuses to be asked for products through it, without a word about what to do in the model."""
    around = Around(lambda m, x: checkpoint(torch.tanh, m(x), use_reentrant=True)).double()
    model, loss_fn = extended(around)
    x, y = data()
    with told(RuntimeError, "'second'", "use_reentrant=True", "starts a backward"), bpk.backpack(extension()):
        loss_fn(model(x), y).backward()
    assert saved(model) == set()


class Anew(torch.autograd.Function):
    """A layer that runs anew in a backward pass of its own, as reversible ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x).tanh(), grads[0])
        return x.grad, None


@pytest.mark.parametrize("behind_a_layer", [False, True])
@pytest.mark.parametrize("kinds", [(), (E.BatchGrad,), (E.DiagGGNExact,)], ids=lambda kinds: str(len(kinds)))
def test_functions_with_a_backward_pass_of_their_own(kinds: tuple[Any, ...], behind_a_layer: bool) -> None:
    """Products with them, of which nobody knew, had been added to `.grad`."""

    def call(first: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = Anew.apply(first(x) if behind_a_layer else x, first)
        return out

    model, loss_fn = extended(Around(call).double())
    x, y = data()
    x.requires_grad_()
    loss_fn(model(x), y).backward()
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads if g is not None]
    with told(RuntimeError, "'second'", "'Anew'", "backward pass of its own"), bpk.backpack(*[e() for e in kinds]):
        loss_fn(model(x), y).backward()
    assert saved(model) == set()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    torch.testing.assert_close([p.grad for p in model.parameters()], values, rtol=0, atol=0)
    model.zero_grad()
    with told(RuntimeError, "'Anew'"), bpk.backpack(*[e() for e in kinds]):
        loss_fn(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_functions_that_ask_for_gradients_are_served() -> None:
    """They give their parameters the gradients that they return, and nothing else."""

    class Asking(Anew):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module, *params: Tensor) -> Tensor:
            return Anew.forward(ctx, x, layer).tanh()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.layer(x).tanh()
            found = torch.autograd.grad(out, (x, *ctx.layer.parameters()), grads[0])
            return found[0], None, *found[1:]

    model, loss_fn = extended(Around(lambda m, x: Asking.apply(m(x), m, *m.parameters())).double())
    x, y = data()
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_fused_attention_in_a_checkpoint() -> None:
    """A checkpoint gives out what its nodes have saved once in a pass: autograd itself needs it."""

    def attend(h: Tensor) -> Tensor:
        q = h[:, None, None].tanh() * h[:, None, :, None]
        return nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos()).sum((1, 2))

    around = Around(lambda m, x: checkpoint(attend, m(x), use_reentrant=False)).double()
    model, loss_fn = extended(around)
    x, y = data()
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@BOTH
def test_a_sample_without_a_batch_axis(extension: Callable[[], Any]) -> None:
    x, y = data()
    model, loss_fn = extended()
    with told(UnsupportedLayer, "no batch axis", r"x\.unsqueeze"), bpk.backpack(extension()):
        loss_fn(model(x[0]), y[0]).backward()
    model, loss_fn = extended(loss=nn.MSELoss())
    with told(UnsupportedLayer, "no batch axis"), bpk.backpack(extension()):
        loss_fn(model(x[0]), torch.zeros(3, dtype=torch.float64)).backward()
    image, loss_fn = extended(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(0), nn.Linear(12, 2)), nn.MSELoss())
    with told(UnsupportedLayer, "no batch axis"), bpk.backpack(extension()):
        loss_fn(image(torch.randn(2, 4, 4)), torch.zeros(2)).backward()


@BOTH
def test_tensors_without_values(extension: Callable[[], Any]) -> None:
    with torch.device("meta"):
        model, loss_fn = extended(mlp(torch.float32), nn.MSELoss())
        loss = loss_fn(model(torch.randn(5, 4)), torch.randn(5, 3))
    with told(RuntimeError, "meta"), bpk.backpack(extension()):
        loss.backward()


@BOTH
def test_parameters_that_a_transform_lends_are_refused(extension: Callable[[], Any]) -> None:
    model, loss_fn = extended()
    x, y = data()
    several = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    with told(RuntimeError, "transform of torch.func"), bpk.backpack(extension()):
        loss_fn(vmap(lambda p: functional_call(model, p, (x,)))(several).mean(0), y).backward()
    with bpk.backpack(extension()):
        loss_fn(model(x), y).backward()
    assert len(saved(model)) == 1


@pytest.mark.parametrize("quietly", [True, False])
def test_a_transform_that_is_none_of_a_context_leaves_nothing_behind(quietly: bool) -> None:
    """Neither where recording is disabled, nor for a context without extensions."""
    model, loss_fn = extended()
    x, y = data()
    with bpk.disable() if quietly else nullcontext():
        vmap(grad(lambda p, a, b: loss_fn(functional_call(model, p, (a[None],)), b[None])), (None, 0, 0))(
            {name: p.detach() for name, p in model.named_parameters()}, x, y
        )
    other, other_loss = extended()
    other.requires_grad_(False)
    with bpk.backpack(*[E.BatchGrad()] * quietly):
        other_loss(other(x.requires_grad_()), y).backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "transform", [lambda m, x: vmap(m)(x), lambda m, x: jvp(m, (x,), (x.cos(),))[1]], ids=["vmap", "jvp"]
)
def test_transforms_of_the_whole_forward_pass_are_right(transform: Callable[..., Tensor]) -> None:
    """What they leave in autograd's graph are functions of parameters."""
    model, loss_fn = extended()
    x, y = data()
    with bpk.backpack(E.BatchGrad(), E.DiagHessian()):
        loss_fn(transform(model, x), y).backward()
    params = [p for p in model.parameters() if hasattr(p, "grad_batch")]
    assert len(params) >= len(list(model.parameters())) - 1, "a tangent does not depend on the last bias"
    for n in range(len(x)):
        loss = loss_fn(transform(model, x[n : n + 1]), y[n : n + 1]) / len(x)
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            torch.testing.assert_close(p.grad_batch[n], g)
    for p in params:
        (g,) = torch.autograd.grad(loss_fn(transform(model, x), y), p, create_graph=True)
        rows = [torch.autograd.grad(g.flatten()[k], p, retain_graph=True)[0].flatten()[k] for k in range(p.numel())]
        torch.testing.assert_close(p.diag_h.flatten(), torch.stack(rows))


@pytest.mark.filterwarnings("ignore")
def test_transforms_of_a_part_are_right() -> None:
    """A layer under a transform is a part of what lies between recorded calls."""

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        out, tangent = jvp(layer, (x,), (torch.ones_like(x),))
        return out + tangent.tanh()

    x, y = data()
    model, loss_fn = Around(forward).double(), nn.CrossEntropyLoss()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    extended(model, loss_fn)
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss_fn(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))


# ---- parameters that are spread over processes ---------------------------------------------------------
@pytest.fixture
def group(tmp_path: Any) -> Iterator[Any]:
    """A group of one process."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors(group: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = mlp()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), group, [Shard(0)]))
    with told(ValueError, r"'0\.weight' \(DTensor\)", "spread over processes"):
        bpk.extend(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processor("processes talk by gloo")
def test_sharded_by_module(group: Any) -> None:
    """FSDP2, before and after `extend`: products are refused, whose tensors would be given back."""
    from torch.distributed.fsdp import fully_shard

    x, y = data()
    after, loss_fn = extended()
    for model in (bpk.extend(fully_shard(mlp(), mesh=group)), fully_shard(after, mesh=group)):
        with bpk.backpack(E.SumGradSquared()):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            assert p.sum_grad_squared.placements == p.placements
        with told(ValueError, "cannot be put together"), bpk.backpack(E.HMP()):
            loss_fn(model(x), y).backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalGGN], ids=lambda kind: kind.__name__)
@pytest.mark.processor("processes talk by gloo")
def test_preconditioned_shards(group: Any, kind: type[Preconditioner]) -> None:
    from torch.distributed.fsdp import fully_shard

    x, y = data()
    model, loss_fn = extended()
    fully_shard(model, mesh=group)
    preconditioner = kind(model)
    with preconditioner:
        loss_fn(model(x), y).backward()
    with told(ValueError, "sharded", "DistributedDataParallel"):
        preconditioner.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processor("processes talk by gloo")
def test_flat_parameters(group: Any) -> None:
    """FSDP1, before and after `extend`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    x, y = data()
    with told(ValueError, "spread over processes"):
        bpk.extend(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))
    model, loss_fn = extended()
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for extension in (E.BatchGrad, E.DiagGGNExact):
        with told(ValueError, "spread over processes"), bpk.backpack(extension()):
            loss_fn(model(x), y).backward()


@BOTH
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_data(extension: Callable[[], Any], layout: torch.layout) -> None:
    x, y = data()
    model, loss_fn = extended()
    with told(UnsupportedLayer, "sparse", "to_dense"), bpk.backpack(extension()):
        loss_fn(model(x.to_sparse(layout=layout)), y).backward()
    assert saved(model) == set()


@pytest.mark.processor("elsewhere torch has no tangents of an LSTM")
def test_tangents_pass_an_extended_model() -> None:
    """Forward mode by `torch.autograd.forward_ad`, which sees parameters that require gradients."""
    x, _ = data()
    tangent = torch.randn_like(x)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Unflatten(1, (4, 1)), LastState()).double()
    found = []
    for _ in range(2):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent)
        bpk.extend(model)
    assert found[0] is not None
    torch.testing.assert_close(found[1], found[0])


def test_hooks_that_ask_the_engine_about_inputs() -> None:
    """Those of `FlopCounterMode`, of losses evaluated once more during the backward pass."""
    model, loss_fn = bpk.extend(nn.Linear(4, 3).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(2, 5, 4).double(), torch.randint(3, (2, 5))
    found = []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        with mode, bpk.backpack(E.TokenGrad()):
            loss_fn(model(x).transpose(1, 2), y).backward()
        found.append(model.weight.grad_token)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[0].sum((0, 1)) * 2, model.weight.grad)


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, (h, c) = self.lstm(x)
        return output[:, -1] + h[0] * c[0]
