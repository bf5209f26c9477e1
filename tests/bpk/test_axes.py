"""Which axis is that of samples, where shapes do not tell: another one is as long.

`python -m tests.random_networks.axes --count 400 --seed 0` looks at more models, and `...named_axes` at more programs.
"""

from __future__ import annotations

import pytest

from tests.random_networks import axes, named_axes

SEQUENCES = (6, 9, 10, 11, 27, 37, 61, 64, 75, 78, 84, 92, *range(100, 116))
"""The first dozen were wrong, or refused, before a call's layout in the data was looked at."""

PROGRAMS = range(40)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", SEQUENCES)
def test_sequences_as_long_as_the_batch(seed: int) -> None:
    assert not axes.wrong(seed), axes.draw(seed)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", PROGRAMS)
def test_programs_over_named_axes(seed: int) -> None:
    assert not named_axes.wrong(seed), named_axes.draw(seed)
