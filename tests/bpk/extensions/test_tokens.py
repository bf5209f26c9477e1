"""Gradients, norms and curvature of the losses of single tokens, for every layer family and form of a prediction."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bpk
from bpk import extensions as E
from bpk.costing.allocated import allocated
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.fields import tokens as fields_of_tokens
from bpk.fields.rows import Rows
from bpk.jacobians.attention.layer import AttentionLayer
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.rules import REGISTRY
from tests.bpk.sweeps.test_positions import Words
from tests.helpers import backward
from tests.models.networks import N, Network, is_loss, rule_networks
from tests.references import definition
from tests.references.reference import Reference

T, VOCABULARY = 4, 5
EXACT = (E.TokenGrad, E.TokenL2Grad, E.TokenDiagGGNExact, E.TokenTraceGGNExact, E.TokenProjectedGrad)
NETWORKS = {
    net.name: net
    for rule in REGISTRY
    for net in [net for net in rule_networks(rule) if not is_loss(rule.examples[0])][:1]
}


class Attends(nn.Module):
    """Attention, with predictions `[N, C, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).transpose(1, 2)


@pytest.mark.processor("there is no limit for columns elsewhere")
@pytest.mark.parametrize("subsampling", [None, [2, 0]])
def test_few_columns_travel_at_a_time(subsampling: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fields are numbers: in the memory of few columns, and attention goes back once for each block."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Attends().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 64, 8).double(), torch.randint(VOCABULARY, (3, 64))
    quantities = E.TokenL2Grad(subsampling), E.TokenTraceGGNExact(subsampling)
    pulls: list[int] = []
    pull = AttentionLayer.pull_in_pieces
    monkeypatch.setattr(
        AttentionLayer, "pull_in_pieces", lambda self, call, mat: pulls.append(len(mat)) or pull(self, call, mat)
    )
    found, peaks = [], []
    for at_once in (1 << 62, 4 * 3 * 64 * 16):
        monkeypatch.setattr("bpk.sweeps.starts.tokens.AT_ONCE", at_once)
        backward(model, loss_fn, x, y, *quantities)
        found.append({name: (p.token_l2, p.trace_ggn_exact_token) for name, p in model.named_parameters()})
        pulls.clear()
        work = lambda: backward(model, loss_fn, x, y, E.TokenL2Grad(subsampling))  # noqa: E731
        peaks.append(allocated(work, torch.device("cpu"))[0])
        assert sum(pulls) == 64
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values)
    assert peaks[1] < peaks[0] / 2, peaks


def on_sequences(net: Network) -> tuple[nn.Module, Tensor, Tensor]:
    """The same layers, with predictions `[N, C, T]`."""
    model, _, x, _ = net.build()
    head = nn.Linear(3, VOCABULARY * T).requires_grad_(False)
    return nn.Sequential(model, head, nn.Unflatten(1, (VOCABULARY, T))).double(), x, torch.randint(VOCABULARY, (N, T))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer(name: str) -> None:
    model, x, y = on_sequences(NETWORKS[name])
    loss_fn = nn.CrossEntropyLoss()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y), seed=7, loss=nn.CrossEntropyLoss)
    extensions = [make() for make in EXACT]
    bpk.extend(model), bpk.extend(loss_fn)
    torch.manual_seed(7)
    try:
        backward(model, loss_fn, x, y, *extensions)
    except UnsupportedLayer as error:
        assert "mix" in str(error), "nothing else is refused"
        return
    for key, p in model.named_parameters():
        if p.requires_grad:
            for extension in extensions:
                for found, expected in definition.pairs(extension, ref, key, vars(p)[extension.savefield]):
                    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


# ---- models of sequences, by a loop over tokens ---------------------------------------------------------
class Sequence(nn.Module):
    """Tokens that look at each other, a tied table, a layer that is called twice, a parameter that functions use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.table, self.position = nn.Embedding(VOCABULARY, 4), nn.Parameter(torch.randn(T, 4))
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.position
        mask = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = self.head(self.norm(self.twice(self.twice(x).tanh())))
        return x.transpose(1, 2) if self.form == "extra axis" else x.flatten(0, 1)

    def targets(self) -> Tensor:
        y = torch.randint(VOCABULARY, (N, T))
        return y if self.form == "extra axis" else y.flatten()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention, rows": lambda: Sequence("rows"),
    "attention, extra axis": lambda: Sequence("extra axis"),
    "words, rows": lambda: Words("rows", True),
    "words, time first": lambda: Words("time first", True),
    "words, extra axis": lambda: Words("extra axis", False),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    size = model.table.num_embeddings
    tokens = torch.randint(size, (N, T if isinstance(model, Sequence) else 5))
    return model, tokens, model.targets()


def terms(model: nn.Module, tokens: Tensor, y: Tensor) -> Tensor:
    """The losses `[N, T]` of all tokens, whose mean is the objective."""
    each = functional.cross_entropy(model(tokens), y, reduction="none")
    n, t = tokens.shape
    by_token = each.view(t, n).T if model.form == "time first" else each.view(n, t)
    return by_token / by_token.numel()


def by_loop(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """`[N, T, *p]`: a backward pass of plain autograd for each token."""
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(each, [*named.values()], retain_graph=True) for each in losses.flatten()]
    return {
        name: torch.stack(g).unflatten(0, losses.shape) for name, g in zip(named, zip(*rows, strict=True), strict=True)
    }


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("chunk", [None, 1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_sequences(name: str, chunk: int | None) -> None:
    """Also where few columns exist at a time, and a token has more of them."""
    model, tokens, y = problem(name)
    expected, loss_fn = by_loop(model, terms(model, tokens, y)), nn.CrossEntropyLoss()
    bpk.extend(model), bpk.extend(loss_fn)
    others = (E.BatchGrad(), E.BatchDiagGGNExact())
    backward(model, loss_fn, tokens, y, *(make() for make in EXACT), *others, chunk_size=chunk)
    projected = E.TokenProjectedGrad()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad_token, expected[key])
        torch.testing.assert_close(p.grad_token.sum(1), p.grad_batch)
        torch.testing.assert_close(p.token_l2, expected[key].flatten(2).square().sum(2))
        torch.testing.assert_close(p.projected_grad_token, projected.of_gradients(expected[key].flatten(2), p.shape))
        torch.testing.assert_close(p.diag_ggn_exact_token.sum(1), p.diag_ggn_exact_batch)
        torch.testing.assert_close(p.diag_ggn_exact_token.flatten(2).sum(2), p.trace_ggn_exact_token)


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("name", MODELS)
def test_curvature_is_that_of_each_token(name: str) -> None:
    """That of a token is that of a loss in which all others are ignored."""
    model, tokens, y = problem(name)
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    backward(model, loss_fn, tokens, y, E.TokenDiagGGNExact(), E.TokenTraceGGNExact())
    found = {key: (p.diag_ggn_exact_token, p.trace_ggn_exact_token) for key, p in model.named_parameters()}
    count = tokens.shape[1]
    for t in range(count):
        number = torch.arange(count).expand(tokens.shape)
        number = number if y.dim() > 1 else (number.T if model.form == "time first" else number).flatten()
        backward(model, loss_fn, tokens, torch.where(number == t, y, -100), E.BatchDiagGGNExact())
        for key, p in model.named_parameters():
            torch.testing.assert_close(found[key][0][:, t], p.diag_ggn_exact_batch)
            torch.testing.assert_close(found[key][1][:, t], p.diag_ggn_exact_batch.flatten(1).sum(1))


@pytest.mark.filterwarnings("ignore:These go")
def test_sampled() -> None:
    """Those with the same draws agree, and their mean is the exact one."""
    model, tokens, y = problem("attention, rows")
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    many = (E.TokenDiagGGNMC(500), E.TokenTraceGGNMC(500), E.TokenTraceGGNExact())
    backward(model, loss_fn, tokens, y, *many)
    for p in model.parameters():
        torch.testing.assert_close(p.trace_ggn_mc_token, p.diag_ggn_mc_token.flatten(2).sum(2))
        error = (p.trace_ggn_mc_token - p.trace_ggn_exact_token).norm() / p.trace_ggn_exact_token.norm()
        assert error < 0.15


@pytest.mark.filterwarnings("ignore:These go")
def test_ignored_targets() -> None:
    """The end of a shorter sequence: its rows are zero, and the divisor is that of the others."""
    model, tokens, y = problem("attention, extra axis")
    y[0, 2:], y[2, 3:] = -100, -100
    losses = functional.cross_entropy(model(tokens), y, reduction="none") / int((y >= 0).sum())
    expected = by_loop(model, losses)
    bpk.extend(model)
    backward(model, bpk.extend(nn.CrossEntropyLoss()), tokens, y, E.TokenGrad(), E.TokenTraceGGNExact())
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad_token, expected[key])
        assert bool((p.trace_ggn_exact_token.ne(0) == (y >= 0)).all())


@pytest.mark.parametrize(
    ("loss", "shape", "count"),
    [
        (nn.MSELoss, (3, 4, 2), 4),
        (nn.HuberLoss, (3, 2, 2, 2), 4),
        (nn.BCEWithLogitsLoss, (3, 5), 1),
        (nn.L1Loss, (3, 4, 2), 4),
        (nn.MSELoss, (3,), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:L1Loss is piecewise")
def test_positions_of_other_losses(loss: type[nn.Module], shape: tuple[int, ...], count: int) -> None:
    """All axes between the first and the last tell terms apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, torch.Size(shape[1:]).numel()), nn.Tanh())
    model = nn.Sequential(*model, nn.Unflatten(1, shape[1:]) if len(shape) > 1 else nn.Flatten(0)).double()
    x, y, loss_fn = torch.randn(3, 2).double(), torch.rand(shape).double(), loss()
    each = loss(reduction="none")(model(x), y).reshape(3, count, -1).sum(2) / y.numel()
    expected = by_loop(model, each)
    bpk.extend(model), bpk.extend(loss_fn)
    backward(model, loss_fn, x, y, E.TokenGrad(), E.TokenDiagGGNExact(), E.BatchDiagGGNExact())
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad_token, expected[key])
        assert p.diag_ggn_exact_token.shape[1] == count
        torch.testing.assert_close(p.diag_ggn_exact_token.sum(1), p.diag_ggn_exact_batch)


@pytest.mark.filterwarnings("ignore:These go")
def test_chosen_samples() -> None:
    model, tokens, y = problem("attention, extra axis")
    expected, loss_fn = by_loop(model, terms(model, tokens, y)), bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model)
    backward(model, loss_fn, tokens, y, *(make(subsampling=[2, 0, 2]) for make in EXACT))
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad_token, expected[key][[2, 0, 2]])
        torch.testing.assert_close(p.token_l2, expected[key][[2, 0, 2]].flatten(2).square().sum(2))


def test_several_losses() -> None:
    """Tokens of one loss after those of the other, as autograd comes to them; factors may be negative."""
    torch.manual_seed(0)
    model, x = bpk.extend(nn.Linear(4, 3).double()), torch.randn(N, 4).double()
    one, other = bpk.extend(nn.MSELoss()), bpk.extend(nn.CrossEntropyLoss())
    y, labels = torch.randn(N, 3).double(), torch.randint(3, (N,))
    with bpk.backpack(E.TokenGrad(), E.TokenL2Grad()):
        out = model(x)
        (-2 * one(out, y) + other(out, labels)).backward()
    found = model.weight.grad_token
    alone = []
    for factor, loss_fn, target in ((-2, one, y), (1, other, labels)):
        with bpk.backpack(E.BatchGrad()):
            (factor * loss_fn(model(x), target)).backward()
        alone.append(model.weight.grad_batch)
    assert found.shape == (N, 2, 3, 4)
    order = (0, 1) if torch.allclose(found[:, 0], alone[0]) else (1, 0)
    torch.testing.assert_close(found, torch.stack([alone[k] for k in order], 1))
    torch.testing.assert_close(model.weight.token_l2, found.flatten(2).square().sum(2))


def test_derivatives() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 3).double(), torch.randn(N, T, 2).double(), torch.randint(3, (N, T))
    net, loss_fn = bpk.extend(nn.Sequential(model, nn.Tanh())), bpk.extend(nn.CrossEntropyLoss())

    def measure(*extensions: BackpropExtension) -> None:
        with bpk.backpack(*extensions):
            loss_fn(net(x).transpose(1, 2), y).backward(create_graph=True)

    measure(E.TokenL2Grad(), E.TokenTraceGGNExact(), E.TokenDiagGGNExact())
    weight = model.weight
    found = torch.autograd.grad(weight.token_l2.square().sum(), weight, retain_graph=True)[0]
    each = functional.cross_entropy((x @ weight.T + model.bias).tanh().transpose(1, 2), y, reduction="none") / y.numel()
    rows = [torch.autograd.grad(one, weight, create_graph=True)[0].square().sum() for one in each.flatten()]
    torch.testing.assert_close(found, torch.autograd.grad(torch.stack(rows).square().sum(), weight)[0])
    z = (x @ weight.T + model.bias).tanh()
    p = z.softmax(-1)
    diagonal = ((p - p.square()) * (1 - z.square()).square())[..., None] * x.square()[:, :, None] / y.numel()
    for field, expected in ("diag_ggn_exact_token", diagonal), ("trace_ggn_exact_token", diagonal.sum((2, 3))):
        torch.testing.assert_close(vars(weight)[field], expected)
        slope = torch.autograd.grad(vars(weight)[field].square().sum(), weight, retain_graph=True)
        torch.testing.assert_close(slope, torch.autograd.grad(expected.square().sum(), weight, retain_graph=True))


@pytest.mark.parametrize("piece", [0, fields_of_tokens.PIECE])
def test_rows_are_not_formed_for_norms(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rule has them as outer products; of others those of several tokens, where they take little memory."""
    one: list[int] = []
    several: list[torch.Size] = []
    all_rows, rows_of_block = Rows.all_rows, Rows.rows

    def spy(self: Rows) -> Tensor:
        rows = all_rows(self)
        one.append(rows.numel() // rows[0, 0].numel())
        return rows

    def spy_on_block(self: Rows, key: Hashable) -> Tensor:
        rows = rows_of_block(self, key)
        several.append(rows.shape[2:])
        return rows

    monkeypatch.setattr(Rows, "all_rows", spy)
    monkeypatch.setattr(Rows, "rows", spy_on_block)
    monkeypatch.setattr(fields_of_tokens, "PIECE", piece)
    model, x, y = problem("attention, extra axis")
    bpk.extend(model)
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, E.TokenL2Grad(), E.TokenTraceGGNMC())
    assert max(one, default=0) <= N
    if piece:
        assert several and model.attention.in_proj_weight.shape not in several
    else:
        assert one


# ---- what is refused -------------------------------------------------------------------------------------
def test_refused_where_samples_mix() -> None:
    model = bpk.extend(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    with pytest.raises(UnsupportedLayer, match=r"Why: (?s:.*)Do: "):
        backward(
            model, bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 4).double(), torch.arange(5) % 3, E.TokenGrad()
        )


@pytest.mark.filterwarnings("ignore:These go")
def test_data_sets() -> None:
    """Rows of all batches, if these have one length."""
    model, tokens, y = problem("attention, extra axis")
    loss_fn, batches = nn.CrossEntropyLoss(), [(tokens[:2], y[:2]), (tokens[2:], y[2:])]
    expected = by_loop(model, terms(model, tokens, y))
    found = bpk.accumulate(model, loss_fn, batches, *(make() for make in EXACT), per_sample=True)
    for key in expected:
        torch.testing.assert_close(found[key]["grad_token"].to(expected[key]), expected[key])
        norms = expected[key].flatten(2).square().sum(2)
        torch.testing.assert_close(found[key]["token_l2"].to(norms), norms)
    net = nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY)).double()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return self.loss(out.flatten(0, 1), target.flatten())

    with pytest.raises(ValueError, match=r"'grad_token' of '0.weight' has rows \[3, 5, 3\].*(?s:.*)Why: (?s:.*)Do: "):
        bpk.accumulate(net, Loss(), [(tokens, y), (tokens[:, :3], y[:, :3])], E.TokenGrad(), per_sample=True)


def test_verify_finds_mistakes() -> None:
    """Of a field whose tokens are exchanged."""

    class Exchanged(E.TokenL2Grad):
        field = "exchanged"

        def value(self, uses: object) -> Tensor:
            return super().value(uses).flip(1)  # type: ignore[arg-type]

        def definition(self, plain: object) -> Tensor:
            return super().definition(plain)  # type: ignore[arg-type]

    model, tokens, y = problem("attention, extra axis")
    assert bpk.verify(model, nn.CrossEntropyLoss(), tokens, y, *(make() for make in EXACT))
    assert not bpk.verify(model, nn.CrossEntropyLoss(), tokens, y, Exchanged())


class ByToken(nn.Module):
    """So many outputs for each token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


WITHOUT = [e for e in every_extension() if type(e).__name__.startswith(("Token", "OutputDiag"))]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("extension", WITHOUT, ids=str)
@pytest.mark.parametrize(("outputs", "tokens"), [(0, 7), (3, 0)])
def test_predictions_without_entries(extension: Any, outputs: int, tokens: int) -> None:
    """`Nothing was backpropagated`, or an error of torch's."""
    model, loss_fn = bpk.extend(ByToken(outputs)), bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(extension):
        output = model(torch.randn(4, tokens, 5))
        loss_fn(output, torch.zeros_like(output)).backward()
    found = vars(model.inner.weight)[extension.savefield]
    assert found.shape[:2] == ((0, 4) if "Output" in str(extension) else (4, tokens))
    assert not found.any()


@pytest.mark.parametrize("extension", WITHOUT, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_loss_without_tokens_beside_another(extension: Any, first: bool) -> None:
    torch.manual_seed(0)
    model, losses = bpk.extend(ByToken(3)), [bpk.extend(nn.MSELoss(reduction="sum")) for _ in range(2)]
    x, found = torch.randn(4, 5, 5), []
    for parts in ([x], [x[:, :0], x] if first else [x, x[:, :0]]):
        with bpk.backpack(extension):
            values = [
                loss(out := model(part), torch.zeros_like(out)) for loss, part in zip(losses, parts, strict=False)
            ]
            torch.manual_seed(1)
            torch.stack(values).sum().backward()
        found.append(vars(model.inner.weight)[extension.savefield].clone())
    torch.testing.assert_close(*found)
