"""Where samples are as the user says it: the graph has to agree, and nothing is guessed."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.attribution import Found
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.checking import check_hypothesis
from bpk.plan.samples.findings import NotInFront
from bpk.plan.samples.hypotheses import all_numberings, require_rows
from bpk.recording.context.told import Told

ROWS = "pass the sample of each row: samples=torch.arange(N).repeat(T), where rows are steps of all N, one by one."


def attribute_as_told(behind: Behind, told: Told) -> Found:
    """`attribute`, where the user has told how many samples there are, or of which of them each row of the root is.

    Of their number alone, it follows where they are if one way to share out the rows agrees with the graph, and no
    other does.

    Raises:
        NotInFront: If a layer has to be left to autograd first.
        UnsupportedLayer: If a row feeds other samples, or the number is not enough.
    """
    root, refusal = behind.root, ""
    require_rows(root, behind.sources)
    for any_shared in (False, True):
        check = partial(check_hypothesis, behind, False, any_shared=any_shared, told=True)
        agree, stopped = list[Tensor](), list[NotInFront]()
        for numbers in all_numberings(root.batch_size, told.n) if told.rows is None else (told.rows,):
            try:
                check(numbers, told.n, movable=True)
                agree.append(numbers)
            except NotInFront as stop:
                stopped.append(stop)
            except UnsupportedLayer as error:
                refusal = refusal or str(error).partition("\n")[0]
            finally:
                behind.put_back()
        if len(agree) + len(stopped) > 1:
            raise UnsupportedLayer(
                f"backpack(..., samples={told.n}) does not say which rows of {root.where} belong to each.",
                f"its {root.batch_size} rows may be those of each sample one after another, or in another order.",
                ROWS,
            )
        if stopped:
            raise stopped[0]
        if agree:
            return told.n, check(agree[0], told.n, movable=True)
    raise UnsupportedLayer(
        f"{root.where} has other samples than the {told.n} of backpack(..., samples=).",
        refusal,
        f"{ROWS[:-1]}, or leave it out.",
    )
