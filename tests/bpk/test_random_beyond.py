"""What is made of several passes, batches or derivatives in the input, on random networks.

`python -m tests.random_networks.beyond --count 400 --seed 0` looks at more of them.
"""

from __future__ import annotations

import pytest

from tests.random_networks.beyond import examine

SEEDS = (0, 7, 32)
"""Few and quick ones."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_network(seed: int) -> None:
    wrong, refused, count = examine(seed)
    assert not wrong, wrong[0]
    assert count > 30
    assert all("Do:" in text for text in refused), refused
