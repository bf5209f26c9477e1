"""What happens to a model in training between passes, and errors in the middle of one."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk.extensions.backprop_extension import BackpropExtension
from tests.stateful.models import MODELS
from tests.stateful.passes import Action, some
from tests.stateful.scene import Scene


class Stopped(Exception):
    """An error of the user's."""


@contextmanager
def stopped() -> Iterator[None]:
    """Expect it."""
    try:
        yield
    except Stopped:
        return
    raise AssertionError("the user's error got lost")


def error_in_the_loss(scene: Scene, r: random.Random) -> None:
    def fail(grad: Tensor) -> None:
        raise Stopped

    batch, extensions = scene.batch(r), some(r)
    prediction = scene.model(batch.x)
    prediction.register_hook(fail)
    with stopped(), bpk.backpack(*extensions):
        scene.objective(prediction, batch).backward()
    nothing_of(scene, extensions)


def error_in_the_hook(scene: Scene, r: random.Random) -> None:
    calls, at = 0, r.randint(1, 3)

    def fail(module: nn.Module) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Stopped

    extensions = some(r)
    with stopped(), bpk.backpack(*extensions, extension_hook=fail):
        scene.forward(scene.batch(r)).backward()
    nothing_of(scene, extensions)


def error_in_the_forward_pass(scene: Scene, r: random.Random) -> None:
    def fail(*_: Any) -> None:
        raise Stopped

    layers = [m for name, m in scene.model.named_modules() if scene.is_used(name)]
    layer = r.choice([m for m in layers if not list(m.children())] or layers)
    handle = layer.register_forward_pre_hook(fail) if r.random() < 0.5 else layer.register_forward_hook(fail)
    with stopped(), bpk.backpack(*some(r)):
        scene.forward(scene.batch(r)).backward()
    handle.remove()
    gc.collect()  # before 2.12, a checkpoint's hooks stay as long as the error does


def nothing_of(scene: Scene, extensions: list[BackpropExtension]) -> None:
    """A pass that failed leaves no fields."""
    left = [e.savefield for e in extensions for p in scene.model.parameters() if hasattr(p, e.savefield)]
    assert not left, f"{left} after a pass that failed"


def mode(scene: Scene, r: random.Random) -> None:
    scene.train(r.random() < 0.5)


def zero_grad(scene: Scene, r: random.Random) -> None:
    scene.optimizer.zero_grad(set_to_none=r.random() < 0.5)


def step(scene: Scene, r: random.Random) -> None:
    scene.forward(scene.batch(r)).backward()
    scene.optimizer.step()


def freeze(scene: Scene, r: random.Random) -> None:
    params = [p for name, p in scene.model.named_parameters() if scene.is_used(name)]
    r.choice(params).requires_grad_(False)
    if not any(p.requires_grad for p in params):
        params[0].requires_grad_(True)


def unfreeze(scene: Scene, r: random.Random) -> None:
    scene.model.requires_grad_(True)


def load(scene: Scene, r: random.Random) -> None:
    torch.manual_seed(r.randrange(2**30))
    scene.model.load_state_dict(MODELS[scene.name]().state_dict())


def copied(scene: Scene, r: random.Random) -> None:
    """A copy, in memory or from a file, takes the place of the model, whose graph is passed afterwards."""
    batch, extensions = scene.batch(r), some(r)
    loss, old = scene.forward(batch), scene.model
    if r.random() < 0.5:
        new = copy.deepcopy(old)
    else:
        file = io.BytesIO()
        torch.save(old, file)
        file.seek(0)
        new = torch.load(file, weights_only=False)
    with bpk.backpack(*extensions):
        loss.backward()
    scene.check(scene.reference(batch), extensions)
    scene.model = new
    scene.retrain()


def extended_again(scene: Scene, r: random.Random) -> None:
    assert bpk.extend(scene.model) is scene.model


def forward_passes(scene: Scene, r: random.Random) -> None:
    """Without a backward pass."""
    batch = scene.batch(r)
    scene.forward(batch)
    with torch.no_grad():
        scene.forward(batch)
    with bpk.disable():
        scene.forward(batch)
    bpk.memory_cleanup(scene.model)


ERRORS: tuple[Action, ...] = (error_in_the_loss, error_in_the_hook, error_in_the_forward_pass)
OTHERS: tuple[Action, ...] = (
    mode, zero_grad, step, freeze, unfreeze, load, copied, extended_again, forward_passes,
)  # fmt: skip
CHANGING = (step, load)
"""What may change parameters."""
