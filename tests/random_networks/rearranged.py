"""Programs that rearrange samples and other axes in any way: split, merged, stacked, picked, repeated, in any order.

    python -m tests.random_networks.rearranged --count 400 --seed 0

Each step acts on features and, in the same way, on the sample of each row. Told of these (`samples=`), all numbers have
to be right; otherwise, they are right, or refused, or the user is told of a guess, but for a few in a hundred.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import bpk
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.hunts import parser_of_seeds
from tests.random_networks.by_owner import CLASSES, ENTRIES, WIDTH, missing_or_wrong

Both = tuple[Tensor, Tensor]
"""Features `[..., D]`, and the sample `[...]` of each row."""

MOST_ROWS = 30
GUESSES = ("taken for", "guess", "mixes", "sees other", "seem to be", "those of the chain rule")
"""What warnings say that tell of one."""


class Program(nn.Module):
    """Runs the steps of a seed on data with samples along some axis; `owner` is that of each row of the result."""

    def __init__(self, seed: int, samples_first: bool) -> None:
        super().__init__()
        self.seed, r = seed, random.Random(seed)
        self.n = n = r.choice([2, 2, 3, 3, 4])
        others = [r.choice([n, n, 2, 3, 2 * n]) for _ in range(r.choice([0, 1, 1, 1, 2]))]
        self.place = 0 if samples_first else r.randint(0, len(others))
        self.shape = (*others[: self.place], n, *others[self.place :])
        self.steps, self.reads_first, self.moves = r.randint(2, 7), r.random() < 0.4, r.random() < 0.5
        self.layers, self.owner, self.used = nn.ModuleList(), torch.empty(0), 0
        with torch.no_grad():
            self(self.data())

    def data(self) -> Tensor:
        """Numbers."""
        return torch.randn(*self.shape, ENTRIES)

    def of(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The next layer; it is made in the first pass."""
        self.used += 1
        if self.used > len(self.layers):
            self.layers.append(make())
        return self.layers[self.used - 1]

    def linear(self, width: int = WIDTH, entries: int = WIDTH) -> nn.Module:
        """The next layer, a linear one."""
        return self.of(lambda: nn.Linear(entries, width))

    def forward(self, x: Tensor) -> Tensor:
        r, self.used = random.Random(f"steps of {self.seed}"), 0
        numbers = torch.arange(self.n).view([-1 if k == self.place else 1 for k in range(len(self.shape))])
        h, own = x, numbers.expand(self.shape)
        if self.reads_first:
            h = self.linear(entries=ENTRIES)(h)
        for step in range(self.steps):
            h, own = self.step(r, h, own)
            if step == 1 and not self.reads_first:  # functions in front of all layers
                h = self.linear(entries=h.shape[-1])(h)
        h = self.linear(CLASSES, h.shape[-1])(h)
        if r.random() < 0.2 and own.dim():  # a row for each sample
            self.owner = torch.arange(self.n)
            return torch.zeros(self.n, CLASSES).to(h).index_add(0, own.reshape(-1), h.reshape(-1, CLASSES))
        self.owner = own.reshape(-1)
        return h.reshape(-1, CLASSES)

    def owners(self) -> Tensor:
        """The sample of each row of the loss."""
        return self.owner

    def step(self, r: random.Random, h: Tensor, own: Tensor) -> Both:
        """One step."""
        axes = own.dim()
        kinds: list[Callable[[random.Random, Tensor, Tensor, int], Both]] = [self.of_features, self.of_features]
        if axes:
            kinds += [self.ordered, self.ordered, self.split, self.merged, self.along, self.along, self.in_parts]
        if axes and own.numel() < MOST_ROWS and axes < 4:
            kinds += [self.repeated]
        if axes and self.moves:
            kinds += [self.moved]
        return r.choice(kinds)(r, h, own, r.randrange(axes) if axes else 0)

    def of_features(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """A function or a layer of features, or of positions along an axis."""
        width, choice = h.shape[-1], r.randrange(5)
        if choice == 0:
            return h.tanh(), own
        if choice == 1 and own.dim():
            shape = [size if k in (axis, h.dim() - 1) else 1 for k, size in enumerate(h.shape)]
            table = self.of(lambda: nn.ParameterList([torch.randn(shape)]))
            return h + table[0], own  # type: ignore[index]
        if choice == 2:
            return self.of(lambda: nn.LayerNorm(width))(h), own
        if choice == 3:
            return self.linear(width, width)(h.reshape(-1, width)).view(h.shape), own
        return self.linear(width, width)(h), own

    def ordered(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """Axes in another order, as a view or a copy."""
        order = r.sample(range(own.dim()), own.dim())
        h = h.permute(*order, own.dim())
        return (h.contiguous() if r.random() < 0.4 else h), own.permute(order)

    def merged(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """Two axes as one."""
        end = min(axis + 1, own.dim() - 1)
        return h.flatten(axis, end), own.flatten(axis, end)

    def split(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """An axis as two."""
        factors = [k for k in range(2, own.shape[axis]) if own.shape[axis] % k == 0]
        if not factors or own.dim() > 3:
            return h, own
        first = r.choice(factors)
        return h.unflatten(axis, (first, -1)), own.unflatten(axis, (first, -1))

    def in_parts(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """Two layers, each for a part of an axis; or one for each index, stacked elsewhere."""
        width, size = h.shape[-1], own.shape[axis]
        if r.random() < 0.5 and size > 1:
            at = r.randint(1, size - 1)
            first, last = h.tensor_split([at], axis)
            return torch.cat([self.linear(width, width)(first), self.linear(width, width)(last)], axis), own
        layer, to = self.linear(width, width), r.randrange(own.dim())
        return torch.stack([layer(part).tanh() for part in h.unbind(axis)], to), torch.stack(own.unbind(axis), to)

    def along(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """What mixes an axis along which all is of one sample."""
        if not torch.equal(own, own.narrow(axis, 0, 1).expand_as(own)):
            return h, own
        choice, size = r.randrange(5), own.shape[axis]
        if choice == 0:
            return h.cumsum(axis), own
        if choice == 1:
            return h - 0.5 * h.mean(axis, keepdim=True), own
        if choice == 2 and own.dim() > 1:
            return h.amax(axis), own.select(axis, 0)
        if choice == 3:
            return self.linear(size, size)(h.movedim(axis, -1)).movedim(-1, axis), own
        q = h.movedim(axis, -2)
        return ((q @ q.mT).softmax(-1) @ q).movedim(-2, axis), own

    def repeated(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """Several rows of each."""
        choice, copies = r.randrange(3), r.choice([2, self.n])
        if choice == 0:  # draws, each with a factor
            factor = torch.linspace(0.5, 1.5, copies).view([-1] + [1] * (h.dim() - axis)).to(h)
            shape = (*own.shape[:axis], copies, *own.shape[axis:])
            return factor * h.unsqueeze(axis).expand(*shape, -1), own.unsqueeze(axis).expand(shape)
        if choice == 1:
            return h.repeat_interleave(2, axis), own.repeat_interleave(2, axis)
        other = self.linear(h.shape[-1], h.shape[-1])(h).tanh()
        return torch.cat([h, other], axis), torch.cat([own, own], axis)

    def moved(self, r: random.Random, h: Tensor, own: Tensor, axis: int) -> Both:
        """Rows in another order, or some of them, at least one of each sample."""
        drawn = torch.Generator().manual_seed(self.seed)
        if r.random() < 0.6:
            order = torch.randperm(own.shape[axis], generator=drawn)
            return h.index_select(axis, order), own.index_select(axis, order)
        mask = torch.rand(own.shape, generator=drawn) > 0.3
        for k in range(self.n):
            mask[tuple((own == k).nonzero()[0])] = True
        return h[mask], own[mask]


def wrong(seed: int, told: str = "rows", samples_first: bool = False) -> list[str]:
    """What is wrong in two passes of the program of a seed, with other data."""
    torch.manual_seed(seed)
    model, loss_fn = bpk.extend(Program(seed, samples_first).double()), bpk.extend(nn.CrossEntropyLoss())
    found = list[str]()
    for _ in range(2):
        found += missing_or_wrong(model, loss_fn, model.data().double(), model.n, told)
    return found


def untold(seed: int) -> str:
    """What a user gets who does not say where samples are: it is right, refused, wrong and told, or wrong."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = wrong(seed, "", samples_first=True)
        except UnsupportedLayer:
            return "refused"
    told = any(guess in str(warning.message) for warning in heard for guess in GUESSES)
    return ("a guess, told" if told else "wrong") if found else "right"


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those that are wrong where samples are told."""
    options = parser_of_seeds(__doc__).parse_args(argv)
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        counts[f"untold: {untold(seed)}"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = wrong(seed)
            except UnsupportedLayer as error:
                counts["told: refused"] += 1
                print(seed, str(error).splitlines()[0], flush=True)
                continue
        counts["told: wrong" if found else "told: right"] += 1
        if found:
            print(seed, found, flush=True)
    print(dict(counts))
    return counts["told: wrong"]


if __name__ == "__main__":
    sys.exit(main())
