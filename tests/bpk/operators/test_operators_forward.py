"""`forward=` of operators: batches of any form, and models that are called in any way."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import operators
from bpk.operators.forward import there
from tests.bpk.operators.test_operators import DOUBLE, matrices
from tests.bpk.operators.test_operators_elsewhere import Checkpointed, Cubed

CURVATURE = ["GGN", "Hessian", "Fisher", "EmpiricalFisher", "KFAC"]


class Encoding(UserDict):
    """What tokenizers return: a mapping that is no dictionary, with attributes, and that moves itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: x.to(device) for name, x in self.data.items()}
        return self


class Tagger(nn.Module):
    """Attention with a mask, and a class for each word, called and answering as models of transformers are and do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        h = self.embedding(input_ids)
        scores = (self.mix(h) @ h.mT).masked_fill(attention_mask[:, None] == 0, -torch.inf)
        return SimpleNamespace(logits=self.head(torch.tanh(h + scores.softmax(-1) @ h)))


class Flat(nn.Module):
    """The wrapper that `forward=` saves, for references."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.model, self.by = model, forward

    def forward(self, batch: Any) -> Tensor:
        return self.by(self.model, dict(batch))[0]


def tagged(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """As training loops do: labels are taken out, and the rest is what the model gets."""
    labels = batch.pop("labels")
    return model(**batch).logits.flatten(0, 1), labels.flatten()


def sentences(n: int = 6, length: int = 3) -> dict[str, Tensor]:
    ids, mask, labels = torch.randint(6, (n, length)), torch.ones(n, length), torch.randint(3, (n, length))
    mask[::2, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def cut(batch: dict[str, Tensor], kind: Callable[[dict[str, Tensor]], Any]) -> list[Any]:
    """Unequal batches of a large one."""
    return [kind({name: x[a:b] for name, x in batch.items()}) for a, b in ((0, 1), (1, 3), (3, 6))]


def reference(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return matrices(Flat(model, tagged), nn.CrossEntropyLoss(), batch, batch["labels"].flatten())


@pytest.fixture
def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().to(DOUBLE)


# ---- the matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, Encoding, UserDict])
@pytest.mark.parametrize("name", ["GGN", "Hessian", "Jacobian"])
def test_matrices_of_mappings(tagger: nn.Module, name: str, kind: Any) -> None:
    """All products with batches, and with one batch: one vector, several, a few at a time, transposed."""
    batch = sentences()
    want = reference(tagger, batch)[name]
    for data in (cut(batch, kind), kind(batch), [kind(batch)]):
        A = getattr(operators, name)(tagger, nn.CrossEntropyLoss(), data, chunk_size=7, forward=tagged)
        torch.testing.assert_close(A.to_dense(), want)
        torch.testing.assert_close(A.T.to_dense(), want.T)
        v = torch.randn(want.shape[1], dtype=DOUBLE)
        torch.testing.assert_close(A @ v, want @ v)
        torch.testing.assert_close(torch.from_numpy(A.to_scipy() @ v.cpu().numpy()), (want @ v).cpu())
    named = dict(tagger.named_parameters())
    found = torch.cat([x.flatten() for x in (A @ named).values()])
    torch.testing.assert_close(found, want @ torch.cat([p.detach().flatten() for p in named.values()]))


@pytest.mark.parametrize("blocks", ["layer", "parameter"])
@pytest.mark.parametrize("name", ["GGN", "Hessian"])
def test_blocks(tagger: nn.Module, name: str, blocks: str) -> None:
    batch = sentences()
    names = [key.split(".")[0] if blocks == "layer" else key for key, _ in tagger.named_parameters()]
    of = [key for key, p in zip(names, tagger.parameters(), strict=True) for _ in range(p.numel())]
    mask = torch.tensor([[a == b for b in of] for a in of])
    A = getattr(operators, name)(tagger, nn.CrossEntropyLoss(), cut(batch, Encoding), blocks, forward=tagged)
    torch.testing.assert_close(A.to_dense(), reference(tagger, batch)[name] * mask)


def gradients_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of what each row adds to the summed loss `[R, P]`."""
    z, y = tagged(model, dict(batch))
    terms = nn.functional.cross_entropy(z, y, reduction="none")
    grads = [torch.autograd.grad(term, list(model.parameters()), retain_graph=True) for term in terms]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])


def test_empirical_fisher_and_fisher(tagger: nn.Module) -> None:
    batch, loss_fn = sentences(), nn.CrossEntropyLoss()
    count = (batch["labels"] != -100).sum()
    g = gradients_of_rows(tagger, batch)
    A = operators.EmpiricalFisher(tagger, loss_fn, cut(batch, dict), forward=tagged)
    torch.testing.assert_close(A.to_dense(), g.T @ g / count)
    F = operators.Fisher(tagger, loss_fn, cut(batch, dict), mc_samples=20000, forward=tagged)
    torch.testing.assert_close(F.to_dense(), reference(tagger, batch)["GGN"], atol=5e-3, rtol=0)


@pytest.mark.parametrize("data", ["batches", "one"])
def test_factors(tagger: nn.Module, data: str) -> None:
    """Those of the last layer: `G` is the block of its bias, and `A` the mean over sentences of sums over words."""
    batch, seen = sentences(), list[Tensor]()
    with tagger.head.register_forward_hook(lambda layer, args, out: seen.append(args[0].detach().flatten(0, 1))):
        want = reference(tagger, batch)["GGN"][-3:, -3:]
    K = operators.KFAC(
        tagger, nn.CrossEntropyLoss(), cut(batch, Encoding) if data == "batches" else Encoding(batch), forward=tagged
    )
    G, A = K.factors["head.weight"]
    torch.testing.assert_close(G, want)
    torch.testing.assert_close(A, seen[0].T @ seen[0] / 6)
    v = torch.randn(K.shape[0], dtype=DOUBLE)
    step = K.inverse(0.1) @ v
    torch.testing.assert_close(K @ step + 0.1 * step, v)


def test_curvlinops_takes_them(tagger: nn.Module) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    batch = sentences()
    want = reference(tagger, batch)["GGN"]
    A = operators.GGN(tagger, nn.CrossEntropyLoss(), cut(batch, dict), forward=tagged).to_curvlinops()
    torch.testing.assert_close(A @ torch.eye(len(want), dtype=DOUBLE), want)
    torch.testing.assert_close(curvlinops.xtrace(A, 40), want.trace(), rtol=0.5, atol=0)


class Pair(nn.Module):
    """Two inputs, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.a(x)) * self.b(y), x


@pytest.mark.parametrize("name", ["GGN", "Hessian", "Jacobian"])
def test_models_of_two_inputs(name: str) -> None:
    """A batch of three tensors; as a tuple it is one batch, and in a list it may be a list."""
    torch.manual_seed(0)
    model, loss_fn = Pair().to(DOUBLE), nn.MSELoss()
    x, y, t = (torch.randn(5, size, dtype=DOUBLE) for size in (2, 4, 3))

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(*batch[:2])[0], batch[2]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, both: Any) -> Tensor:
            return self.model(*both)[0]

    want = matrices(Whole(), loss_fn, (x, y), t)[name]
    for data in ((x, y, t), [[x, y, t]], [(x[:2], y[:2], t[:2]), (x[2:], y[2:], t[2:])]):
        A = getattr(operators, name)(model, loss_fn, data, forward=forward)
        torch.testing.assert_close(A.to_dense(), want)


def test_outputs_alone_are_enough_for_the_jacobian(tagger: nn.Module) -> None:
    batch = sentences()
    del batch["labels"]
    J = operators.Jacobian(tagger, None, cut(batch, dict), forward=lambda model, b: model(**b).logits)
    assert J.out_shapes == {"output": (6, 3, 3)}
    want = matrices(Flat(tagger, lambda model, b: (model(**b).logits, None)), nn.MSELoss(), batch, torch.zeros(6, 3, 3))
    torch.testing.assert_close(J.to_dense(), want["Jacobian"])


@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("kind", [Cubed, Checkpointed])
def test_without_forward_mode_and_with_checkpoints(kind: type[nn.Module], chunk_size: int) -> None:
    """The function is called again where torch has no tangents, and where a checkpoint saw them."""
    torch.manual_seed(0)
    model, loss_fn, y = kind().to(DOUBLE).eval(), nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 0])
    x = torch.randn(4, 4, dtype=DOUBLE)
    inputs = x if kind is Cubed else (x[:, :3, None].mT.expand(4, 2, 3), torch.randint(5, (4, 2)))
    z, params = model(inputs), list(model.parameters())
    rows = [torch.autograd.grad(out, params, retain_graph=True, materialize_grads=True) for out in z.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    of_loss = torch.autograd.functional.hessian(lambda z: loss_fn(z, y), z.detach()).reshape(12, 12)
    if kind is Checkpointed:
        model.again = True
    data = {"inputs": inputs, "labels": y}
    for name, want in (("Jacobian", jacobian), ("GGN", jacobian.T @ of_loss @ jacobian)):
        A = getattr(operators, name)(
            model,
            loss_fn,
            data,
            chunk_size=chunk_size,
            forward=lambda model, batch: (model(batch["inputs"]), batch.pop("labels")),
        )
        torch.testing.assert_close(A.to_dense(), want)
        torch.testing.assert_close(A.T.to_dense(), want.T)


# ---- what is left as it is ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CURVATURE, "Jacobian"])
@pytest.mark.parametrize("kind", [dict, Encoding])
def test_batches_and_the_model_stay_as_they_are(tagger: nn.Module, name: str, kind: Any) -> None:
    """Also where the function changes the mapping, and the mapping moves itself; and in inference mode."""
    data, before = cut(sentences(), kind), dict(tagger.named_parameters())
    inner = [id(batch.data) for batch in data if isinstance(batch, Encoding)]
    with torch.inference_mode():
        made = [kind({key: x.clone() for key, x in batch.items()}) for batch in data]
    A, B = (getattr(operators, name)(tagger, nn.CrossEntropyLoss(), d, forward=tagged) for d in (data, made))
    v = torch.randn(A.shape[1], dtype=DOUBLE)
    torch.testing.assert_close(A @ v, A @ v)
    torch.testing.assert_close(A @ v, B @ v)
    assert all(set(batch) == {"input_ids", "attention_mask", "labels"} for batch in data)
    assert inner == [id(batch.data) for batch in data if isinstance(batch, Encoding)]
    assert all(before[key] is p and p.grad is None for key, p in tagger.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tagger.modules())


def test_a_module_that_calls_the_model_in_itself() -> None:
    """Its own parameters are no columns."""

    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = model, nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))

        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self.scale * self.inner(batch["x"]), batch["y"]

    model, x = nn.Linear(3, 2, bias=False).to(DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    data = {"x": x, "y": torch.zeros(4, 2, dtype=DOUBLE)}
    A = operators.GGN(model, nn.MSELoss(reduction="sum"), data, forward=Around(model))
    torch.testing.assert_close(A.to_dense(), 8 * torch.block_diag(x.T @ x, x.T @ x))


def test_extended_models(tagger: nn.Module) -> None:
    batch = sentences()
    A = operators.GGN(bpk.extend(tagger), bpk.extend(nn.CrossEntropyLoss()), cut(batch, dict), forward=tagged)
    torch.testing.assert_close(A.to_dense(), reference(tagger, batch)["GGN"])


@dataclass
class Graphs:
    nodes: Tensor
    names: list[str]


Triple = namedtuple("Triple", ["x", "y", "rest"])


def test_all_tensors_of_a_batch_move() -> None:
    """To another device, in whatever holds them; that of the user stays."""
    x = torch.zeros(2)
    given = Triple(Encoding({"x": x}), UserDict({"x": [x, "name"]}), {"graphs": Graphs(x, ["a"]), "x": (x, None)})
    found = there(given, torch.device("meta"))
    moved = [found.x.x, found.y["x"][0], found.rest["graphs"].nodes, found.rest["x"][0]]
    assert [t.device.type for t in moved] == ["meta"] * 4
    assert type(found) is Triple and type(found.x) is Encoding
    assert found.y["x"][1] == "name" and found.rest["graphs"].names == ["a"] and found.rest["x"][1] is None
    assert given.x.data["x"] is x and given.y["x"][0] is x and given.rest["graphs"].nodes is x


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CURVATURE, "Jacobian"])
def test_batches_that_are_no_pairs_want_a_function(tagger: nn.Module, name: str) -> None:
    batch, loss_fn = sentences(), nn.CrossEntropyLoss()
    for data, kind in ((batch, "dict"), ([Encoding(batch)], "Encoding"), ([tuple(batch.values())], "tuple")):
        with pytest.raises(ValueError, match=rf"(?s){name}\(...\) got {kind} as batch 0.*pass .*forward=lambda model"):
            getattr(operators, name)(tagger, loss_fn, data)
    with pytest.raises(ValueError, match=r"(?s)returns tuple.*forward=lambda"):
        getattr(operators, name)(nn.LSTM(3, 3), loss_fn, (torch.randn(2, 3), torch.arange(2)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, batch: model(batch), "returns Tensor.*one tensor, and the targets"),
        (lambda model, batch: (model(batch), 0, 1), "returns tuple of Tensor, int, int"),
        (lambda model, batch: SimpleNamespace(logits=model(batch)), "returns SimpleNamespace"),
        (lambda model, batch: (SimpleNamespace(logits=model(batch)), 0), "returns tuple of SimpleNamespace, int"),
        (lambda model, batch: None, "returns NoneType"),
        (lambda model, batch: (torch.arange(4), model(batch)), "returns outputs of torch.int64.*come first"),
        (lambda model, batch: (model(batch), model(batch) + 1), "returns targets with a graph.*detach"),
        (lambda model, batch: (model(batch).detach(), torch.zeros(4, 2)), "no graph.*leave out torch.no_grad"),
        (lambda model, batch: (model(batch) + torch.randn(4, 2), torch.zeros(4, 2)), "two results.*in forward="),
        (lambda model, batch: (model(batch)[: torch.randint(1, 5, ())], 0), "two results"),
        ("model(x)", "forward='model.x.', which is no function.*pass forward=lambda"),
    ],
)
@pytest.mark.parametrize("name", ["GGN", "KFAC"])
def test_functions_that_return_something_else(name: str, forward: Any, message: str) -> None:
    torch.manual_seed(3)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        getattr(operators, name)(nn.Linear(3, 2), nn.MSELoss(), [torch.randn(4, 3)], forward=forward)


def test_what_may_be_one_batch_or_several() -> None:
    model, batch = nn.Linear(3, 2), {"x": torch.randn(4, 3)}

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"])

    with pytest.raises(ValueError, match=r"(?s)one batch, or several.*\[batch\] for one"):
        operators.Jacobian(model, None, (batch, batch), forward=forward)
    with pytest.raises(ValueError, match=r"Tensor as loader"):  # its rows would have been batches
        operators.Jacobian(model, None, batch["x"], forward=lambda model, x: model(x))
    assert operators.Jacobian(model, None, [batch, batch], forward=forward).shape == (16, 8)
