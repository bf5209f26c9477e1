"""Sequences of what users do to a model in training: passes, errors, copies, frozen parameters, in any order.

`python -m tests.stateful --count 1000 --seed 0` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.stateful.models import MODELS
from tests.stateful.others import ERRORS, OTHERS
from tests.stateful.passes import PASSES
from tests.stateful.scene import Scene
from tests.stateful.sequences import described, draw, run

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence(seed: int) -> None:
    steps = draw(seed)
    assert not run(seed, steps).failure, described(seed, steps)


def test_every_model_and_action_is_among_them() -> None:
    drawn = {action for seed in SEEDS for action, _ in draw(seed)}
    assert drawn == {*PASSES, *ERRORS, *OTHERS}
    assert {Scene(seed).name for seed in SEEDS} == set(MODELS)


def test_sequences_are_reproducible() -> None:
    assert [draw(seed) for seed in range(5)] == [draw(seed) for seed in range(5)]
    assert run(3, draw(3)) == run(3, draw(3))
