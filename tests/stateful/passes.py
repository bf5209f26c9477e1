"""Backward passes of a model in training. Each checks what it has computed; `Scene.settled` follows it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from tests.stateful.scene import AT_LOSSES, EXPECTED, ROWS, Batch, Scene

Action = Callable[[Scene, random.Random], None]


def some(r: random.Random, most: int = 4) -> list[BackpropExtension]:
    """Different extensions, new ones."""
    kinds: list[type[BackpropExtension]] = r.choice([list(EXPECTED), list(EXPECTED), list(AT_LOSSES)])
    return [kind() for kind in r.sample(kinds, r.randint(1, most))]


def options(r: random.Random) -> dict[str, Any]:
    """How columns travel."""
    return r.choice([{}, {}, {"chunk_size": r.choice([1, 2])}, {"memory": 4000}])


def computed(scene: Scene, batch: Batch, extensions: list[BackpropExtension], **how: Any) -> None:
    """One pass, whose fields are checked."""
    loss = scene.forward(batch)
    with bpk.backpack(*extensions, **how):
        loss.backward()
    scene.check(scene.reference(batch), extensions)


def one_pass(scene: Scene, r: random.Random) -> None:
    batch, extensions = scene.batch(r), some(r)
    before = {n: p.grad.clone() for n, p in scene.model.named_parameters() if p.grad is not None}
    computed(scene, batch, extensions, **options(r))
    scene.check_gradients(scene.reference(batch), before)


def some_samples(scene: Scene, r: random.Random) -> None:
    batch = scene.batch(r)
    chosen = r.sample(range(len(batch.x)), r.randint(1, len(batch.x)))
    part = None if scene.name == "rows" else chosen  # refused where a sample has several rows
    computed(scene, batch, [kind(subsampling=part) for kind in r.sample(ROWS, 2)])


def without_extensions(scene: Scene, r: random.Random) -> None:
    batch = scene.batch(r)
    scene.optimizer.zero_grad()
    scene.forward(batch).backward()
    scene.check_gradients(scene.reference(batch))


def second_backward(scene: Scene, r: random.Random) -> None:
    batch, loss_of = scene.batch(r), scene.forward
    loss, ref = loss_of(batch), scene.reference(batch)
    for number, extensions in enumerate([some(r), some(r), some(r)]):
        with bpk.backpack(*extensions, retain_graph=r.random() < 0.5):
            loss.backward(retain_graph=number < 2)
        scene.check(ref, extensions)


def waiting_forward(scene: Scene, r: random.Random) -> None:
    first, second = scene.batch(r), scene.batch(r)
    loss = scene.forward(first)
    computed(scene, second, some(r))
    extensions = some(r)
    with bpk.backpack(*extensions):
        loss.backward()
    scene.check(scene.reference(first), extensions)


def nested(scene: Scene, r: random.Random) -> None:
    outer, inner, extensions, others = scene.batch(r), scene.batch(r), some(r), some(r)
    with bpk.backpack(*extensions):
        loss = scene.forward(outer)
        with bpk.backpack(*others):
            scene.forward(inner).backward()
        scene.check(scene.reference(inner), others)
        loss.backward()
    scene.check(scene.reference(outer), extensions)


def gradient_alone(scene: Scene, r: random.Random) -> None:
    batch, extensions = scene.batch(r), some(r)
    loss, params = scene.forward(batch), [p for p in scene.model.parameters() if p.requires_grad]
    with bpk.backpack(*extensions):
        torch.autograd.grad(loss, params, allow_unused=True)
    scene.check(scene.reference(batch), extensions)


def hook_takes_fields(scene: Scene, r: random.Random) -> None:
    batch, extensions = scene.batch(r), some(r, 2)
    taken: dict[Tensor, dict[str, Any]] = {}
    names = [e.savefield for e in extensions]
    for p in scene.model.parameters():
        for name in names:
            vars(p).pop(name, None)

    def take(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            taken.setdefault(p, {}).update({n: vars(p).pop(n) for n in names if n in vars(p)})

    with bpk.backpack(*extensions, extension_hook=take):
        scene.forward(batch).backward()
    assert not [n for p in scene.model.parameters() for n in names if hasattr(p, n)], "the hook missed a field"
    for p, fields in taken.items():
        vars(p).update(fields)
    scene.check(scene.reference(batch), extensions)


def data_set(scene: Scene, r: random.Random) -> None:
    batch = scene.batch(r)
    cut = r.randint(1, len(batch.x))
    batches = list(zip(batch.x.split(cut), batch.y.split(cut), strict=True))
    kept = {name: vars(p).copy() for name, p in scene.model.named_parameters()}
    mode = scene.model.training
    scene.train(False)  # dropout would draw other numbers
    extensions = [E.Variance(), E.BatchGrad(), E.DiagHessian()]
    found = bpk.accumulate(scene.model, scene.losses[0], batches, *extensions, per_sample=True)
    batch.factors = (1.0,)
    ref = scene.reference(batch)
    for name, fields in found.items():
        if scene.is_used(name):
            for extension in extensions:
                scene.same(fields[extension.savefield], EXPECTED[type(extension)](ref, name), extension.savefield)
    scene.train(mode)
    assert kept == {name: vars(p) for name, p in scene.model.named_parameters()}, "fields have changed"


PASSES: tuple[Action, ...] = (
    one_pass, some_samples, without_extensions, second_backward, waiting_forward, nested, gradient_alone,
    hook_takes_fields, hook_takes_fields, data_set,
)  # fmt: skip
