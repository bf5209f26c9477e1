"""Every function that the table of dependences knows: nothing that depends on an entry may be missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bpk.plan.dependence import ATTENTION, TABLE, reached_entries
from bpk.plan.graph import Source
from bpk.plan.picks import PICKS
from bpk.recording.graph.identity import Keep, name_of, words

Function = Callable[[Tensor], Tensor]


def sorted_words(text: str) -> list[str]:
    """Names, in the same order in every process."""
    return sorted(words(text))


SAME: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in sorted_words("abs cos cosh erf erfc exp exp2 expm1 neg reciprocal sigmoid sin")
    },
    **{
        name: getattr(torch, name)
        for name in sorted_words("sinc sinh sqrt square tan tanh rsqrt log log10 log1p log2 lgamma")
    },
    **{name: getattr(torch, name) for name in sorted_words("acos asin atan asinh erfinv logit nan_to_num atanh")},
    **{
        name: getattr(F, name)
        for name in sorted_words("celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu")
    },
    **{name: getattr(F, name) for name in sorted_words("logsigmoid mish relu silu softplus softshrink softsign")},
    "acosh": lambda h: torch.acosh(h + 2),
    "threshold": lambda h: F.threshold(h, 0.3, 0.0),
    "prelu": lambda h: F.prelu(h, torch.rand(h.shape[1]).double().requires_grad_()),
    "clone": torch.clone,
    "float and back": lambda h: h.float().double(),
    "alias": torch.ops.aten.alias,
    "identity": Keep.apply,
    "add": lambda h: h + h[:1] * 0 + torch.rand(4, 1, 1, 1).double(),
    "sub": lambda h: 1 - h - h.detach(),
    "rsub": lambda h: torch.rsub(h, 1.0),
    "mul": lambda h: h * torch.rand(1, 3, 1, 1).double() * h.mean((1, 2, 3), keepdim=True),
    "div": lambda h: h / (h.square() + 1),
    "pow": lambda h: h**3 + 2.0**h + h**h,
    "maximum": lambda h: torch.maximum(h, 1 - h) + torch.minimum(h, 1 - h),
    "clamp": lambda h: h.clamp(0.2, 0.8) + h.clamp(min=h.detach() - 1),
    "clamp_min": lambda h: h.clamp_min(0.2) + h.clamp_max(0.8),
    "atan2": lambda h: torch.atan2(h, h + 1) + torch.hypot(h, h + 1),
    "addcmul": lambda h: torch.addcmul(h, h, h + 1) + torch.addcdiv(h, h, h + 1),
    "lerp": lambda h: torch.lerp(h, h + 1, 0.3) + torch.lerp(h, h + 1, h),
    "logaddexp": lambda h: torch.logaddexp(h, 2 * h) + torch.xlogy(h, h + 1),
    "where": lambda h: torch.where(h > 0.5, h, 2 * h),
    "masked_fill": lambda h: h.masked_fill(h > 0.5, 0.0),
    "dropout": lambda h: torch.native_dropout(h, 0.5, True)[0],
    "triangles": lambda h: h.tril() + h.triu(),
    "permute": lambda h: h.permute(1, 0, 3, 2),
    "transpose": lambda h: h.transpose(0, 2),
    "t": lambda h: h.flatten(1).t(),
    "movedim": lambda h: h.movedim(0, 2),
    "view": lambda h: h.view(2, 6, 24),
    "reshape": lambda h: h.transpose(1, 2).reshape(4, -1),
    "unfold": lambda h: h.unfold(2, 2, 1),
    "squeeze": lambda h: h.unsqueeze(1).squeeze(1).unsqueeze(0).squeeze(),
    "expand": lambda h: h[:, :1].expand(4, 3, 4, 6),
    "repeat": lambda h: h.repeat(2, 1, 1, 2),
    "slices": lambda h: h[1:, 0, ::2],
    "slices without bounds": lambda h: torch.ops.aten.slice(torch.ops.aten.slice(h, 1, None, 2), -1, 1, None),
    "diagonal": lambda h: h.diagonal(dim1=1, dim2=2),
    "split": lambda h: h.split(2)[0] + torch.unsafe_split(h, 2)[1] + h.chunk(2)[0] + h[:2] * h.split([1, 2], 1)[0][:2],
    "unbind": lambda h: h.unbind(1)[2] * h.unbind(1)[0],
    "cat": lambda h: torch.cat([h, 2 * h], 1).flip(0),
    "stack": lambda h: torch.stack([h, 2 * h]).roll(1, 1),
    "sum": lambda h: h.sum((1, 2)) + h.sum(),
    "mean": lambda h: h.mean(1) + h.mean(),
    "constant pad": lambda h: F.pad(h, (1, 1)),
    **{f"{mode} pad": lambda h, mode=mode: F.pad(h, (1, 1, 1, 1), mode=mode) for mode in ("reflect", "replicate")},
    **{f"{mode} pad 1d": lambda h, mode=mode: F.pad(h[0], (1, 1), mode=mode) for mode in ("reflect", "replicate")},
    **{f"{mode} pad 3d": lambda h, mode=mode: F.pad(h[None], (1,) * 6, mode=mode) for mode in ("reflect", "replicate")},
    **{
        f"upsample {mode}": lambda h, mode=mode: F.interpolate(h, scale_factor=2, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic")
    },
    **{
        f"upsample {mode} 1d": lambda h, mode=mode: F.interpolate(h[0], 12, mode=mode) for mode in ("nearest", "linear")
    },
    **{
        f"upsample {mode} 3d": lambda h, mode=mode: F.interpolate(h[None], (3, 4, 12), mode=mode)
        for mode in ("nearest", "trilinear")
    },
    "pools": lambda h: F.max_pool2d(h, 2) + F.avg_pool2d(h, 2),
    "pools 1d": lambda h: F.avg_pool1d(h[0], 2) + F.max_pool1d(h[0], 2),
    "pools 3d": lambda h: F.max_pool3d(h[None], 2) + F.avg_pool3d(h[None], 2),
    "adaptive": lambda h: F.adaptive_avg_pool2d(h, (2, 4)) + F.adaptive_max_pool2d(h, (2, 4)),
    "adaptive 1d": lambda h: F.adaptive_avg_pool1d(h[0], 2) + F.adaptive_max_pool1d(h[0], 2),
    "adaptive 3d": lambda h: F.adaptive_avg_pool3d(h[None], 2) + F.adaptive_max_pool3d(h[None], 2),
    "cumsum": lambda h: h.cumsum(1) * h.cumprod(-1) * h.logcumsumexp(2),
    "softmax": lambda h: h.softmax(1) + h.log_softmax(-1),
    "safe softmax": lambda h: torch.ops.aten._safe_softmax(h, 1),
    "reshape in place": lambda h: torch.ops.aten._reshape_alias(h, (2, 6, 24), (144, 24, 1)),
    "patches": lambda h: F.unfold(h, 2) + F.unfold(F.fold(F.unfold(h, 2), (4, 6), 2), 2),
    "sort": lambda h: h.sort(2)[0],
    "reduced": lambda h: h.amax(1) + h.amin(1) + h.max(1)[0] + h.min(1)[0] + h.median(1)[0] + h.prod(1),
    "statistics": lambda h: h.logsumexp((1, 2)) + h.std((1, 2)) + h.var((1, 2)) + h.norm(dim=(1, 2)),
    "kept": lambda h: h / h.norm(dim=1, keepdim=True) - h.amax((1, 2), keepdim=True),
    "of everything": lambda h: h.max() * h.min() * h.prod() + h.norm() + torch.ops.aten.norm(h, 2.0) + h.std(),
    "in the middle": lambda h: h.median() * h.median(1)[0],
    "matrices": lambda h: h.flatten(1) @ torch.rand(72, 2).double(),
    "matrices from the left": lambda h: torch.rand(2, 4).double() @ h.flatten(1),
    "squares": lambda h: h.flatten(1) @ h.flatten(1).t(),
    "batches": lambda h: torch.bmm(h.flatten(0, 1), h.flatten(0, 1).transpose(1, 2)),
    "added": lambda h: torch.addmm(h[0, 0, 0, :2], h.flatten(1), torch.rand(72, 2).double()),
    "added in batches": lambda h: torch.baddbmm(h[0, :1], h[:, 0], torch.rand(4, 6, 6).double()),
    "convolution": lambda h: F.conv2d(h, torch.rand(2, 3, 2, 2).double().requires_grad_()),
    "transposed convolution": lambda h: F.conv_transpose2d(h, torch.rand(3, 2, 2, 2).double()),
    "attention": lambda h: F.scaled_dot_product_attention(h, 2 * h, h + 1),
    "attention with a mask": lambda h: F.scaled_dot_product_attention(h, h, h, torch.rand(1, 1, 4, 4) < 0.7),
    "attention in groups": lambda h: F.scaled_dot_product_attention(h.repeat(1, 2, 1, 1), h, h, enable_gqa=True),
    "fft": lambda h: torch.fft.fft(h, dim=1).real + torch.fft.fftn(h, dim=(1, 2)).imag,
    "fft of real numbers": lambda h: torch.fft.irfft2(torch.fft.rfft2(h)) * torch.fft.rfft(h, dim=-2).abs().sum(),
    "complex numbers": lambda h: torch.view_as_real(torch.polar(h, h).conj() + torch.complex(h, h).angle()),
    "made complex": lambda h: torch.view_as_complex(h.unflatten(-1, (3, 2)).contiguous()).abs(),
    "glu": lambda h: F.glu(h) + F.glu(h, 2).repeat(1, 1, 2, 1)[..., :3],
    "layer norm": lambda h: F.layer_norm(h, (6,), torch.rand(6).double().requires_grad_()) + F.layer_norm(h, (4, 6)),
    "group norm": lambda h: F.group_norm(h, 3),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "batch norm in evaluation": lambda h: F.batch_norm(h, torch.rand(3).double(), torch.rand(3).double()),
}


def stretch_of(function: Function) -> tuple[Tensor, Tensor, Source]:
    """A function of `h` in general position, and its graph as a stretch between two calls."""
    torch.manual_seed(0)
    h = (torch.rand(4, 3, 4, 6).double() * 0.8 + 0.1).requires_grad_()
    start = h * 1
    out = function(start)
    assert out.grad_fn is not None and start.grad_fn is not None
    return h, out, Source(None, 0, ((None, (start.grad_fn, 0)),), (out.grad_fn, out.output_nr))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", SAME.values(), ids=SAME)
def test_no_dependence_is_missing(function: Function) -> None:
    """Where the Jacobian is not zero, something is handed on."""
    h, out, source = stretch_of(function)
    for number in torch.randperm(out.numel())[:12]:
        unit = torch.zeros(out.numel(), dtype=h.dtype).index_fill(0, number, 1.0).reshape(out.shape)
        (row,) = torch.autograd.grad(out, h, unit, retain_graph=True)
        found = reached_entries(source, unit[None])
        assert found is not None, "the table does not know it"
        assert bool(((found[0][0] > 0) | (row == 0)).all())
        assert bool((found[0] >= 0).all())


@pytest.mark.processor("its functions")
def test_every_entry_of_the_table_is_tried() -> None:
    names, seen = set[str](), set()
    ends = [stretch_of(function)[1] for function in SAME.values()]
    waiting = [end.grad_fn for end in ends]  # in torch 2.10, nodes of functions written in Python need their tensors
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(name_of(type(node)))
            waiting += [above for above, _ in node.next_functions]
    assert set(TABLE) - ATTENTION | {"ScaledDotProductFlashAttentionForCpu"} <= names  # others are of other devices


PER_SAMPLE = words("tanh prelu reduced statistics kept softmax cumsum convolution matrices pools adaptive")


@pytest.mark.parametrize(
    "name", [*sorted(PER_SAMPLE), "layer norm", "group norm", "batch norm in evaluation", "upsample bilinear"]
)
def test_samples_stay_apart(name: str) -> None:
    """The table does not call everything mixed, either: functions of samples one by one are known as such."""
    _, out, source = stretch_of(SAME[name])
    unit = torch.zeros_like(out)
    unit[1] = 1.0
    found = reached_entries(source, unit[None])
    assert found is not None
    assert bool((found[0][0, [0, 2, 3]] == 0).all()) and bool((found[0][0, 1] > 0).any())


def with_slices_assigned(h: Tensor) -> Tensor:
    """In place: one slice is that of others, and one is scaled."""
    x = h * 1
    x[:, 1] = h[:, 0]
    x[:, 2].mul_(3.0)
    x[1:3, 2] = h[0, 0]
    return x


ROWS, COLUMNS = torch.tensor([3, 0, 3]), torch.tensor([2, 2, 0])
PICKED: dict[str, Function] = {
    "index": lambda h: h[ROWS],
    "index of an inner axis": lambda h: h[:, :, ROWS],
    "index of two axes": lambda h: h[ROWS, COLUMNS],
    "index of axes apart": lambda h: h[ROWS[:, None], :, COLUMNS],
    "mask": lambda h: h[h > 0.5],
    "mask of an axis": lambda h: h[:, torch.tensor([True, False, True])],
    "masked select": lambda h: h.masked_select(h > 0.5),
    "index select": lambda h: h.index_select(2, ROWS),
    "index select of the last axis": lambda h: h.index_select(-1, ROWS),
    "gather": lambda h: h.gather(1, (h[:, :2] * 3).long()),
    "along": lambda h: torch.take_along_dim(h, h.argsort(-1), -1),
    "top k": lambda h: h.topk(2, -1).values,
    "index add": lambda h: (h * 1).index_add(0, ROWS, h[:3]),
    "index put": lambda h: (h * 1).index_put((ROWS[:2], COLUMNS[:2]), h[:2, 0]),
    "index put of one for all": lambda h: (h * 1).index_put((ROWS[:2],), h[:1]),
    "index put, added": lambda h: (h * 1).index_put((ROWS,), h[:3], accumulate=True),
    "index copy": lambda h: torch.zeros_like(h).index_copy(0, ROWS[:2], h[:2]),
    "scatter add": lambda h: (h * 1).scatter_add(2, (h[:, :, :2] * 3).long(), h[:, :, :2]),
    "scatter": lambda h: torch.zeros_like(h).scatter(0, torch.full((1, 3, 4, 6), 2), h[:1]),
    "slices assigned": with_slices_assigned,
    "strided": lambda h: h.as_strided((4, 2, 3), (72, 1, 12), 5),
    "masked scatter": lambda h: (h * 1).masked_scatter(h > 0.6, h.flip(0)),
}


@pytest.mark.parametrize("function", PICKED.values(), ids=PICKED)
def test_what_data_pick_is_known_for_now(function: Function) -> None:
    """Entries that are taken get what comes to them, and no others; what is only overwritten may be among them."""
    h, out, source = stretch_of(function)
    overwrites = name_of(type(out.grad_fn)) in ("IndexPut", "MaskedScatter")
    for number in torch.randperm(out.numel())[:12]:
        unit = torch.zeros(out.numel(), dtype=h.dtype).index_fill(0, number, 1.0).reshape(out.shape)
        (row,) = torch.autograd.grad(out, h, unit, retain_graph=True)
        found = reached_entries(source, unit[None], now=True)
        assert found is not None and reached_entries(source, unit[None]) is None
        assert bool(((found[0][0] > 0) | (row == 0)).all())
        assert overwrites or torch.equal(found[0][0] > 0, row != 0)


@pytest.mark.processor("its functions")
@pytest.mark.parametrize("function", [*SAME.values(), *PICKED.values()], ids=[*SAME, *PICKED])
def test_what_repeats_a_number_is_spread_as_others(function: Function) -> None:
    """Of columns in which last axes, or all, repeat one number (stride 0), less is looked at, and found is the same."""
    _, out, source = stretch_of(function)
    for axis in range(out.dim()):
        some = torch.rand(2, *out.shape[:axis], *[1] * (out.dim() - axis)).double() + 0.1
        some[1, ..., 0] = 0.0
        columns = some.expand(2, *out.shape)
        found = reached_entries(source, columns, now=True)
        expected = reached_entries(source, columns.contiguous(), now=True)
        assert found is not None and expected is not None
        torch.testing.assert_close(found[0], expected[0])


def test_every_function_that_picks_is_tried() -> None:
    kinds = [type(stretch_of(function)[1].grad_fn) for function in PICKED.values()]
    names = {name_of(kind) or kind.__name__ for kind in kinds}
    assert set(PICKS) <= names


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h[torch.tensor([1, 0, 2, 3])],
        lambda h: h.gather(0, torch.zeros(1, 3, 4, 6, dtype=torch.long)),
        lambda h: torch.linalg.inv(h[..., :4]),
        lambda h: torch.linalg.svdvals(h),
    ],
    ids=["index", "gather", "inverse", "singular values"],
)
def test_what_is_not_known_is_said(function: Function) -> None:
    _, out, source = stretch_of(function)
    assert reached_entries(source, torch.ones_like(out, dtype=torch.float64)[None]) is None


def test_ways_to_parameters_do_not_matter() -> None:
    """What computes a weight may be anything."""
    weight = torch.rand(6, 2).double().requires_grad_()
    _, out, source = stretch_of(lambda h: h @ torch.linalg.pinv(weight).t())
    assert reached_entries(source, torch.ones_like(out)[None]) is not None


def test_modules_with_backward_hooks_are_identities() -> None:
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda *args: None)
    _, out, source = stretch_of(lambda h: layer(h.sin()).cos())
    assert reached_entries(source, torch.ones_like(out)[None]) is not None
