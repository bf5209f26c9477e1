"""`bpk.support(model, inputs=...)`: the calls of one recorded forward pass, and the functions in between."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from bpk.extending import attach, check_module
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.families.passage import PASSAGE
from bpk.plan.graph import Source
from bpk.plan.samples.placement import place
from bpk.plan.sources import Sources
from bpk.plan.support import Kind, Support
from bpk.plan.support import support as answer
from bpk.recording.before import keep
from bpk.recording.graph.losses import write_losses
from bpk.recording.graph.sums import is_recovered_sum
from bpk.recording.membership import parts_of
from bpk.recording.record import Record
from bpk.rules import REGISTRY
from bpk.support.of_layers import IDLE, is_idle, of_layer
from bpk.support.table import Cell, SupportTable
from bpk.verification.duplicates import duplicate
from bpk.verification.problem import Arguments, undisturbed


def recorded(model: nn.Module, extensions: Sequence[BackpropExtension], inputs: Any) -> SupportTable:
    """The table of a copy of the model that is called once; what is extended of the model is extended there."""
    with undisturbed(None, [p.device for p in model.parameters()]):
        check_module(model)
        copy = duplicate(model, None)
        for path in parts_of(model):
            attach(copy.get_submodule(path), path, False)
        given = Arguments.of(inputs, 0, model).map(lambda x: x.detach().clone())
        forward = Forward(copy, copy(*given.args, **given.kwargs), extensions)
        return SupportTable(tuple(forward.cells(extensions)))


class Forward:
    """One recorded forward pass, looked at from its output."""

    def __init__(self, model: nn.Module, output: Any, extensions: Sequence[BackpropExtension]) -> None:
        live = [x for x in tensors_in(output) if x.requires_grad]
        kept = [keep(x) for x in live if x.dim()]
        if not kept:  # the model returns its loss alone
            nodes = [x.grad_fn for x in live if x.grad_fn is not None]
            losses = [loss for node in nodes for loss in write_losses(node)]
            kept = [(loss.entrance(0).one_to_graph(loss.inputs[0]), loss.edges[0]) for loss in losses]
            kept = kept or [keep(x) for x in live]
        whole = Binding(nn.Identity(), tuple(x for x, _ in kept))
        self.root = Record(whole.options, PASSAGE, whole, whole.inputs, tuple(edge for _, edge in kept), {}, {})
        self.root.module.__dict__["_bpk_path"] = "the output"
        self.sources = Sources()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.order = {id(module): k for k, module in enumerate(model.modules())}
        self.refusal = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")

            def has_module_extension(record: Record) -> bool:
                return any(e.module_extension(record.module) is not None for e in extensions)

            try:
                placement = place(self.root, self.sources, True, has_module_extension)
            except UnsupportedLayer as error:
                self.refusal = " ".join(str(error).split())
                placement = place(self.root, self.sources, False, has_module_extension)
        self.above = placement.above
        self.left = {id(m): m for m in placement.left if REGISTRY.find(m) is None}

    def cells(self, extensions: Sequence[BackpropExtension]) -> Iterator[Cell]:
        """Layers in the order of the model, functions before the layer that they feed."""
        seen: set[tuple[str, str]] = set()
        for module in self.left.values():
            yield from of_layer(module.__dict__.get("_bpk_path", ""), module, extensions)
        for record in sorted((*self.above, self.root), key=self.rank):
            rows = [self.of_source(source, extensions) for source in self.sources[record].values()]
            if record.rule is not PASSAGE and not is_recovered_sum(record):
                rows.append([self.of_record(record, extension) for extension in extensions])
            for row in rows:
                if row and (row[0].path, row[0].layer) not in seen:
                    seen.add((row[0].path, row[0].layer))
                    yield from row

    def rank(self, record: Record) -> tuple[int, bool]:
        """The order in which calls are listed: a sum is in front of the layer that reads it."""
        reader = self.reader(record)
        return self.number(reader), reader is record

    def number(self, record: Record) -> int:
        """Where a call is in the order of the model."""
        return self.order.get(id(record.module), len(self.order))

    def reader(self, record: Record) -> Record:
        """The call in front of which a sum is (of those that read it, the first in the model); another call itself."""
        while is_recovered_sum(record):
            readers = [r for r in (*self.above, self.root) if record in self.sources.producers(r)]
            record = min(readers, key=self.number)
        return record

    def of_record(self, record: Record, extension: BackpropExtension) -> Cell:
        """A call: the question that the dispatcher asks."""
        name = type(record.module).__name__
        feeds = self.sources.feed(record)
        has_params = any(p.requires_grad for p in record.params.values())
        if extension.module_extension(record.module) is not None:
            found = Support(Kind.SUPPORTED, "By a module extension of its own.")
        elif record.problem:
            found = Support(Kind.REFUSED, record.problem, record.binding.do)
        elif self.refusal and extension.second_order and has_params:
            found = Support(Kind.REFUSED, self.refusal)
        else:
            found = answer(extension, record.rule, record.call() if record.rule is not None else None, name)
        if found.kind is Kind.REFUSED and not (feeds or has_params):
            found = Support(Kind.SUPPORTED, "Nothing before it needs a gradient.")
        if found.kind is Kind.REFUSED and is_idle(extension, record.params.values()):
            found = IDLE
        return Cell(record.path, name, type(extension).__name__, found.kind, found.reason, found.do)

    def of_source(self, source: Source, extensions: Sequence[BackpropExtension]) -> list[Cell]:
        """Plain functions before a call, and the parameters that they use."""
        if source.stretch is None or not (source.targets or source.trained):
            return []
        used = [self.names[id(p)] for p in source.trained if id(p) in self.names]
        more = f" and {len(used) - 1} more parameters" if len(used) > 1 else ""
        what = f"functions of {used[0]}{more}" if used else "functions"
        where = f"before {self.reader(source.consumer).path}"
        return [Cell(where, what, type(extension).__name__, Kind.GENERIC, "", "") for extension in extensions]
