"""Forms of single ops that torch's vmap lacks, does badly or gets wrong."""

from vgrad.lowering.attention import fold as fold
from vgrad.lowering.attention import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from vgrad.lowering.members import FORMS as FORMS
from vgrad.lowering.members import Members as Members
from vgrad.lowering.truthful import Truth as Truth
from vgrad.lowering.truthful import UnsupportedOp as UnsupportedOp
from vgrad.lowering.vmapped import VMAPPED as VMAPPED
