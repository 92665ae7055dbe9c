"""Recurrent nets: their cells, whole nets, gradients through time, packed sequences."""

from vgrad.lowering.sequences.cells import steps as steps
from vgrad.lowering.sequences.packed import PACKED as PACKED
from vgrad.lowering.sequences.recurrent import recurrent_layer as recurrent_layer
from vgrad.lowering.sequences.recurrent import recurrent_net as recurrent_net
