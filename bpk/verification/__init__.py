"""`bpk.verify`: any quantity of any model against its definition, by plain autograd."""

from bpk.verification.result import Row, Verdict, Verification
from bpk.verification.run import verify

__all__ = ["Row", "Verdict", "Verification", "verify"]
