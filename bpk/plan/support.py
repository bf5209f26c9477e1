"""`support`: can an extension handle a layer? One pure function for the dispatcher, the docs and the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from weakref import WeakSet

from torch import nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, explain, value_error, warn
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.losses.by_autograd import COUPLES
from bpk.jacobians.losses.loss import HAS_PARAMETERS, MAKE_LAYER, Loss
from bpk.jacobians.rule import Rule
from bpk.plan.quantity import FAIL_ERROR, FAIL_SILENT, Quantity, is_of_batch
from bpk.recording.record import Record
from bpk.rules import REGISTRY

MANY = 6
"""How many layers and parameters a message lists."""


class Kind(Enum):
    """How a layer is served."""

    SUPPORTED = "supported"
    GENERIC = "generic"
    REFUSED = "refused"


@dataclass(frozen=True)
class Support:
    """The answer: how a layer is served, and if not, why and what to do."""

    kind: Kind
    reason: str = ""
    do: str = ""


NO_RULE = "bpk has no rule for this class of layer: autograd itself carries what travels through it."
WRITE_RULE = "bpk.register() a rule for it, to make it faster."
NO_LOSS = "bpk has no rule for this class of loss."
WRITE_LOSS = (
    "bpk.register() a rule for it, of which bpk.register(AutodiffLoss({name})) is the shortest (AutodiffLoss is in "
    "bpk.jacobians.losses.loss)."
)
BY_HAND = "write one and call extension.set_module_extension(...)."
WAY_OUT = "call model.eval() first, replace the layer, or use a first-order extension."
KEEP_APART = "call model.eval() first, or replace the layer (GroupNorm for BatchNorm)."
SUMS = "Sums over the batch exist: DiagGGNExact, DiagGGNMC, DiagHessian, HMP, GGNMP, PCHMP."
WHOLE_BATCH = "The quantity is that of the whole batch, and autograd itself carries what travels through the layer."
ADD_AXIS = "add one, also to the target: x.unsqueeze(0)."
USE_HESSIAN = "use quantities of the exact Hessian: DiagHessian, BatchDiagHessian or HMP."
OTHER_LOSS = "use a loss that adds up terms of single samples, or a first-order extension."
CHAIN_RULE = (
    "first-order quantities are what the chain rule gives, layer by layer; call model.eval() first for those of "
    "samples."
)

OF_TERMS = "With subsampling=, second derivatives of layers need the gradient of some terms of the loss only."
NO_SUBSAMPLING = "leave out subsampling=, or use DiagGGNExact, DiagGGNMC or GGNMP."

GENERIC: WeakSet[nn.Module] = WeakSet()
"""Layers that take the generic way, and whose user has been told."""

MIXING: WeakSet[nn.Module] = WeakSet()
"""Layers that mix samples, and whose user has been told."""


def support(extension: Quantity, rule: Rule | None, call: Call | None = None, name: str = "it") -> Support:
    """Whether `extension` can be computed for, and pass, a layer with this rule.

    Args:
        extension: The extension.
        rule: The layer's rule, or `None` if there is none.
        call: A call of the layer; reasons that depend on options (training mode) need it.
        name: How the advice calls the layer's class.
    """
    if not extension.works_by_rules:
        return Support(
            Kind.REFUSED, f"{extension} works through module extensions only, and has none for {name}.", BY_HAND
        )
    if rule is None:
        return Support(Kind.GENERIC, NO_RULE, WRITE_RULE)
    reason = rule.obstacle(call) if call is not None and extension.second_order else None
    mixing = rule.mixing(call) if call is not None else None
    if extension.needs_independence and mixing is not None:
        return Support(Kind.REFUSED, f"{mixing.rstrip('.')}.", KEEP_APART)
    if extension.second_order and mixing is not None and not isinstance(rule, Loss):
        if is_of_batch(extension):
            return Support(Kind.GENERIC, f"{mixing.rstrip('.')}. {WHOLE_BATCH}")
        why, do = (OF_TERMS, NO_SUBSAMPLING) if extension.sums_samples else ("", f"{WAY_OUT} {SUMS}")
        return Support(Kind.REFUSED, f"{mixing.rstrip('.')}. {why}".strip(), do)
    if reason is not None:
        do = OTHER_LOSS if isinstance(rule, Loss) else WAY_OUT
        do = f"{do} {SUMS}" if reason == COUPLES else do
        do = ADD_AXIS if reason.rstrip(".").endswith("no batch axis") else do
        return Support(Kind.REFUSED, reason.rstrip(".") + ".", do)
    if call is not None and isinstance(rule, Loss) and extension.sweep().needs_root:
        reason = rule.no_root(call)
        if reason is not None:
            return Support(Kind.REFUSED, f"{reason}.", USE_HESSIAN)
    kind = Kind.GENERIC if isinstance(rule, Autodiff) and not isinstance(rule, Loss) else Kind.SUPPORTED
    return Support(kind) if mixing is None else Support(kind, mixing.rstrip(".") + ".", CHAIN_RULE)


def require_support(extension: Quantity, record: Record, feeds: Callable[[Record], bool]) -> None:
    """Raise, warn or stay silent where an extension cannot handle a recorded call.

    `feeds` says whether anything upstream waits for what travels through a call.
    """
    rule = record.rule
    if record.is_loss and extension.second_order and record.output.dim() > 0:
        raise value_error(
            f"{extension} needs a scalar loss, but {record.where} returned shape {list(record.output.shape)}.",
            "it is a quantity of one scalar objective, and these are no terms of single samples, one row each.",
            "use reduction='mean' or reduction='sum', or a loss module of your own that returns the weighted sum, "
            "extended.",
        )
    if record.problem:
        answer = Support(Kind.REFUSED, record.problem, record.binding.do)
    elif rule is None and record.output.dim() == 0:
        own = ", ".join(name for name, p in record.params.items() if p.requires_grad)
        write = WRITE_LOSS.format(name=type(record.module).__name__)
        answer = Support(Kind.REFUSED, *((f"{HAS_PARAMETERS} ({own}).", MAKE_LAYER) if own else (NO_LOSS, write)))
    else:
        asks = rule is not None and (extension.second_order or rule.may_mix)
        answer = support(extension, rule, record.call() if asks else None, type(record.module).__name__)
    if answer.kind is not Kind.REFUSED:
        if rule is not None and answer.reason:
            caution(record, answer)
        return
    has_params = any(p.requires_grad for p in record.params.values())
    if not (has_params or feeds(record)):
        return
    message = refusal(extension, record, answer)
    wrong = extension.works_by_rules and (extension.second_order or extension.needs_independence)
    if extension.fail_mode == FAIL_ERROR or wrong or (record.problem and rule is not None and has_params):
        raise UnsupportedLayer(message)
    if has_params and extension.fail_mode != FAIL_SILENT:
        warn(message)


def tell(layers: Iterable[nn.Module], holders: Iterable[nn.Module], second_order: bool, by_functions: Set[int]) -> None:
    """Tell the user once what takes the generic way, and why.

    Args:
        layers: Layers that were left to autograd; those with a rule of their own only moved the batch axis.
        holders: Modules with parameters of their own that functions use.
        second_order: Whether columns travel. Without, only parameters take more time than they would by a rule.
        by_functions: By `id`: parameters that functions use behind the loss, other than those that they only multiply
            with, which a rule serves.
    """
    new = {module: None for module in (*layers, *holders) if module not in GENERIC}
    parts = []
    for module in new:
        trained = {name: id(p) for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        own = [name for name, p in trained.items() if p in by_functions]
        if trained and not own:
            continue
        where, unknown = module.__dict__.get("_bpk_path", ""), REGISTRY.find(module) is None
        if unknown and not any(module.children()) and (own or second_order):
            parts.append(f"layer '{where}' ({type(module).__name__})" if where else f"layer {type(module).__name__}")
        else:
            parts += [f"parameter '{where}.{name}'" if where else f"parameter '{name}'" for name in own if unknown]
    GENERIC.update(new)
    if parts:
        shown = ", ".join(parts[:MANY]) + (f" and {len(parts) - MANY} more" if len(parts) > MANY else "")
        why = "there is no rule for these layers, or plain functions use these parameters."
        do = (
            "nothing is needed, all values are right; a rule makes layers faster (bpk.register). bpk.support lists all."
        )
        warn(explain(f"These go the generic way, through autograd itself: {shown}.", why, do))


def caution(record: Record, answer: Support) -> None:
    """Tell the user once that a layer mixes samples."""
    if record.module not in MIXING:
        MIXING.add(record.module)
        what = f"Layer {record.where} mixes samples."
        warn(explain(what, answer.reason, answer.do))


def refusal(extension: Quantity, record: Record, answer: Support) -> str:
    """The message of a refusal: what, why, what to do, and where the rule is."""
    verb = "pass layer" if extension.second_order else "be computed for layer"
    if record.output.dim() == 0:
        verb = "start at loss"
    return explain(
        f"{extension} cannot {verb} {record.where}.",
        answer.reason,
        answer.do,
        rule_file(record.rule),
    )


def rule_file(rule: Rule | None) -> str:
    """In which file a rule's family lives, for messages."""
    return "" if rule is None else "/".join(Path(inspect.getfile(type(rule))).parts[-2:])


def announce(warning: str | None, extensions: Iterable[Quantity]) -> None:
    """Tell the user once that quantities will be zero, and what to use instead."""
    if warning and any(e.second_order and e.sweep().of_loss_hessian for e in extensions):
        warn(warning)


def require_batch(record: Record) -> None:
    """Refuse an empty batch, and a single sample without a batch axis."""
    least = record.rule.least_axes if isinstance(record.rule, Loss) and not record.problem else 0
    live = [x for x in record.inputs if x.requires_grad] if least else []
    if short := [x for x in live if x.dim() < least]:
        alone = len(short) == len(live)
        given = "a prediction" if alone else "a tensor that depends on parameters, beside its prediction,"
        what = f"The loss {record.where} got {given} of shape {tuple(short[0].shape)}, which has no batch axis."
        do = ADD_AXIS if alone else "let the model repeat it for all samples: temperature.expand(len(x), 1)."
        raise UnsupportedLayer(what, "quantities are those of the samples of a batch.", do)
    if not record.problem and record.inputs and record.batch_size == 0:
        what = f"The batch at {record.where} is empty."
        why = "individual and averaged quantities of no samples are undefined."
        do = "skip empty batches (for example drop_last=True in the DataLoader)."
        raise value_error(what, why, do)


def require_axis(extensions: Sequence[Quantity], records: Iterable[Record]) -> None:
    """Refuse layers that were given a single sample without a batch axis."""
    for record in records:
        reason = record.rule.obstacle(record.call()) if record.rule is not None and not record.problem else None
        if reason is not None and reason.rstrip(".").endswith("no batch axis"):
            answer = Support(Kind.REFUSED, f"{reason.rstrip('.')}.", ADD_AXIS)
            what = f"The samples of layer {record.where} cannot be counted."
            alone = explain(what, answer.reason, answer.do)  # of the gradient alone
            raise UnsupportedLayer(refusal(extensions[0], record, answer) if extensions else alone)


def check_samples(extension: Quantity, record: Record) -> None:
    """Refuse sample indices beyond the batch."""
    if extension.subsampling and max(extension.subsampling) >= record.batch_size:
        raise value_error(
            f"{extension}: sample index {max(extension.subsampling)} is out of range at {record.where}.",
            f"the batch has {record.batch_size} samples (axis 0).",
            "pass indices from 0 to N - 1.",
        )
