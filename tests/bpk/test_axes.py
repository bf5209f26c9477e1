"""Which axis is that of samples, where shapes do not tell: as many steps as samples.

`python -m tests.random_networks.axes --count 400 --seed 0` looks at more of them.
"""

from __future__ import annotations

import pytest

from tests.random_networks.axes import draw, wrong

SEEDS = (6, 9, 10, 11, 27, 37, 61, 64, 75, 78, 84, 92, *range(100, 120))
"""The first dozen were wrong, or refused, before a call's layout in the data was looked at."""


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", SEEDS)
def test_sequences_as_long_as_the_batch(seed: int) -> None:
    assert not wrong(seed), draw(seed)
