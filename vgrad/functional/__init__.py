"""A module as a pure function of its parameters and buffers, and losses on it."""

from vgrad.functional.batch_norm import replace_batch_norm as replace_batch_norm
from vgrad.functional.freezing import freeze as freeze
from vgrad.functional.losses import batch_loss as batch_loss
from vgrad.functional.losses import sample_loss as sample_loss
from vgrad.functional.model import FunctionalModel as FunctionalModel
from vgrad.functional.model import make_functional as make_functional
from vgrad.functional.model import (
    make_functional_with_buffers as make_functional_with_buffers,
)
from vgrad.functional.writing import write_grads_ as write_grads_
