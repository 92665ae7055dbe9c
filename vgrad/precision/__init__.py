"""Mixed precision that works inside `grad` and `vmap`."""

from vgrad.precision.alignment import AlignmentReport as AlignmentReport
from vgrad.precision.alignment import alignment_report as alignment_report
from vgrad.precision.autocasting import AutocastMode as AutocastMode
from vgrad.precision.autocasting import autocast as autocast
from vgrad.precision.loss_scale import DynamicLossScale as DynamicLossScale
from vgrad.precision.loss_scale import LossScale as LossScale
from vgrad.precision.loss_scale import NoOpLossScale as NoOpLossScale
from vgrad.precision.loss_scale import StaticLossScale as StaticLossScale
from vgrad.precision.modules import PolicyModel as PolicyModel
from vgrad.precision.modules import loss_under as loss_under
from vgrad.precision.modules import policy_for as policy_for
from vgrad.precision.ops import KINDS as KINDS
from vgrad.precision.ops import Kind as Kind
from vgrad.precision.policy import Policy as Policy
from vgrad.precision.policy import cast_floating as cast_floating
from vgrad.precision.policy import cast_to_full as cast_to_full
from vgrad.precision.policy import cast_to_half as cast_to_half
from vgrad.precision.skipping import all_finite as all_finite
from vgrad.precision.skipping import select_tree as select_tree
