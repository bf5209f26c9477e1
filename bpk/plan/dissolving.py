"""Calls of layers without parameters between curved functions, such as a softmax between two products.

Functions and layer have one second derivative together, over the entries of what feeds the functions. Apart, each
would bring columns of its own, over all entries in between, of which attention has one for each pair of positions. Such
calls are left to autograd: they become part of the stretch that the functions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bpk.jacobians.families.passage import Passage
from bpk.plan.graph import Source
from bpk.plan.quantity import Quantity
from bpk.plan.samples.placement import Placement
from bpk.plan.sources import Sources
from bpk.recording.record import Record


def may_join(extensions: Sequence[Quantity]) -> bool:
    """Whether some extension has columns of second derivatives, and no other depends on what is one call."""
    second = [e for e in extensions if e.second_order]
    return any(e.joins_calls for e in second) and all(e.joins_calls or e.linear_in_terms for e in second)


def join(placement: Placement, has_module_extension: Callable[[Record], bool]) -> None:
    """Leave such calls behind a root to autograd."""
    root, sources = placement.root, placement.sources
    above = sources.upstream(root)
    if any(is_curved(source) for record in above for source in sources[record].values()):
        between = Between(root, above, sources, has_module_extension)
        placement.leave([record for record in between.candidates if between.stands(record)])


def is_curved(source: Source) -> bool:
    """Whether an input is what nonlinear functions return."""
    return source.stretch is not None and not source.is_linear


class Between:
    """Which of the calls behind a root stand between curved functions: one by one, or several in a row."""

    def __init__(
        self,
        root: Record,
        above: Sequence[Record],
        sources: Sources,
        has_module_extension: Callable[[Record], bool],
    ) -> None:
        self.sources = sources
        self.candidates = {record: None for record in above if is_plain(record) and not has_module_extension(record)}
        self.readers: dict[Record, list[Source]] = {record: [] for record in above}
        for record in (*above, root):
            for source in sources[record].values():
                for target, _ in source.targets:
                    self.readers[target].append(source)

    def onwards(self, record: Record) -> list[Source]:
        """What reads the result of a call, or of candidates that do."""
        found, waiting, seen = list[Source](), [record], {record}
        while waiting:
            for source in self.readers[waiting.pop()]:
                reader = source.consumer
                if reader not in self.candidates or is_curved(source):
                    found.append(source)
                elif reader not in seen:  # streams branch and meet again
                    seen.add(reader)
                    waiting.append(reader)
        return found

    def back(self, record: Record) -> list[Source]:
        """What feeds a call, or candidates that do."""
        found, waiting, seen = list[Source](), [record], {record}
        while waiting:
            for source in self.sources[waiting.pop()].values():
                before = {target for target, _ in source.targets}
                if is_curved(source) or not before <= self.candidates.keys():
                    found.append(source)
                else:
                    waiting += before - seen
                    seen |= before
        return found

    def stands(self, record: Record) -> bool:
        """Whether curved functions read a call, and feed it by no more entries than its result has, beside those that
        the functions which read it depend on anyway."""
        read, fed = self.onwards(record), self.back(record)
        if not (read and fed and all(map(is_curved, (*read, *fed)))):
            return False
        known = {target for source in read for target, _ in source.targets}
        new = {target for source in fed for target, _ in source.targets} - known
        return sum(target.output.numel() for target in new) <= record.output.numel()


def is_plain(record: Record) -> bool:
    """Whether a call has a rule that describes it, and no parameters."""
    usual = record.rule is not None and not record.problem and record.recomputed is None
    return usual and not record.params and not record.is_loss and not isinstance(record.rule, Passage)
