"""What is known of classes goes when they do."""

import gc

from bpk.jacobians.core.by_class import ByClass


class Kept:
    """A class that stays."""


def test_values_are_found_by_class() -> None:
    known = ByClass[int]()
    known[Kept] = 1
    known[Kept] = 2
    assert (known.get(Kept), known.get(int), len(known)) == (2, None, 1)
    known.clear()
    assert known.get(Kept) is None


def test_a_class_that_is_gone_is_forgotten() -> None:
    known = ByClass[int]()
    known[type("Gone", (), {})] = 1
    gc.collect()
    assert not len(known)
