"""One entry of a tuple."""

from bpk.custom_module import generated

ReduceTuple = generated("ReduceTuple")
