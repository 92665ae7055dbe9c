"""Samples, parameters and members over the ranks of torch.distributed.

The result does not depend on how many ranks there are.

* `data_parallel`: make a transform or a step one of all ranks
* `local_batches`: cut each batch of a sampler among the ranks
* `LocalBatches`: what that returns
* `member_parallel`: make a function of an ensemble one of ranks with members each
* `own_members`, `all_members`: this rank's members of a tree, and the way back
* `member_range`: the numbers of this rank's members
* `shard`, `gather`: keep this rank's part of each tensor, and the way back
* `replicated`: a tree as the first rank has it
* `alone`: a mesh of this process alone
* `RankError`: another rank has failed, or ranks are at different places
"""

from typing import TYPE_CHECKING

from vgrad.distributed.alone import alone
from vgrad.distributed.data_parallel import data_parallel, replicated
from vgrad.distributed.loading import LocalBatches, local_batches
from vgrad.distributed.member_parallel import (
    all_members,
    member_parallel,
    member_range,
    own_members,
)
from vgrad.distributed.sharding import gather, shard
from vgrad.ranks import RankError
from vgrad.ranks import Ranks as Ranks
from vgrad.renamed import raising

__all__ = [
    "LocalBatches",
    "RankError",
    "all_members",
    "alone",
    "data_parallel",
    "gather",
    "local_batches",
    "member_parallel",
    "member_range",
    "own_members",
    "replicated",
    "shard",
]

if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__
