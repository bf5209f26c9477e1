"""What `bpk` needs of FSDP2 (`fully_shard`) that has no public name, as `engine.py` has it of the rest of torch.

FSDP2 puts a node into the graph in front of each of its modules, and hooks on the results behind them. Both start
communication; neither is a function that `bpk` may differentiate, or may run while it does.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from bpk.jacobians.core.errors import runtime_error
from bpk.recording import engine
from bpk.recording.context.state import CTX

ENTRIES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction._backward_cls",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward",
)
"""What this file uses. If one goes: sharded models are refused."""


@lru_cache(maxsize=1)
def pass_on_sharding() -> None:
    """Let FSDP2's node hand on what it gets, and its hooks rest while `bpk` differentiates.

    The hook is a method of a class of torch, which is replaced, once: results bear it wherever they come from.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        engine.PASSING_ON[engine.node_class(RegisterPostBackwardFunction)] = 1
        known = FSDPState._pre_backward
    except (ImportError, AttributeError) as error:
        raise runtime_error(
            "Models sharded by fully_shard (FSDP2) are not supported with this version of torch.",
            f"FSDP2 has changed inside: {error}.",
            "use DistributedDataParallel, a plain model, or the versions in constraints.txt.",
        ) from error

    def pre_backward(state: FSDPState, grad: Tensor) -> Tensor:
        return grad if CTX.quiet else known(state, grad)

    FSDPState._pre_backward = pre_backward  # type: ignore
