"""Factors: compact forms of the gradients that one use of a parameter leaves."""

from vgrad.persample.factors.base import Dense as Dense
from vgrad.persample.factors.base import Factor as Factor
from vgrad.persample.factors.base import Norm as Norm
from vgrad.persample.factors.base import Outer as Outer
from vgrad.persample.factors.base import Probes as Probes
from vgrad.persample.factors.base import Scaled as Scaled
from vgrad.persample.factors.base import Zero as Zero
from vgrad.persample.factors.combined import Tied as Tied
from vgrad.persample.factors.conv import Conv as Conv
from vgrad.persample.factors.reductions import Sums as Sums
from vgrad.persample.factors.rows import Rows as Rows
