"""Factors: compact forms of the gradients that one use of a parameter leaves."""

from vgrad.factors.base import Dense as Dense
from vgrad.factors.base import Factor as Factor
from vgrad.factors.base import Norm as Norm
from vgrad.factors.base import Outer as Outer
from vgrad.factors.base import Probes as Probes
from vgrad.factors.base import Scaled as Scaled
from vgrad.factors.base import Zero as Zero
from vgrad.factors.columns import Columns as Columns
from vgrad.factors.combined import Tied as Tied
from vgrad.factors.conv import Conv as Conv
from vgrad.factors.experts import Experts as Experts
from vgrad.factors.reductions import Sums as Sums
from vgrad.factors.rows import Rows as Rows
