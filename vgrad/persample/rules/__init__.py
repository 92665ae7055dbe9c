"""Rules: what the ops that take parameters leave for the backward pass.

Each file has the rules of one family of ops; importing the room fills `RULES`.
"""

from vgrad.persample.factors import Conv as Conv
from vgrad.persample.factors import Dense as Dense
from vgrad.persample.factors import Factor as Factor
from vgrad.persample.factors import Outer as Outer
from vgrad.persample.factors import Rows as Rows
from vgrad.persample.rules import attention as attention
from vgrad.persample.rules import composite as composite
from vgrad.persample.rules import convolution as convolution
from vgrad.persample.rules import normalisation as normalisation
from vgrad.persample.rules import products as products
from vgrad.persample.rules import recurrent as recurrent
from vgrad.persample.rules.table import RULES as RULES
from vgrad.persample.rules.table import Lowering as Lowering
from vgrad.persample.rules.table import Recording as Recording
from vgrad.persample.rules.table import Rule as Rule
from vgrad.persample.rules.table import lowered as lowered
from vgrad.persample.rules.table import rule as rule
