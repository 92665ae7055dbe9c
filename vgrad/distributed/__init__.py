"""Samples, parameters and members over the ranks of torch.distributed.

The result does not depend on how many ranks there are.

* `data_parallel`: make a transform or a step one of all ranks
* `local_batches`: cut each batch of a sampler among the ranks
* `shard_members`, `gather_members`: this rank's members of a tree, and the inverse
* `member_range`: the numbers of this rank's members
* `shard`, `gather`: keep this rank's part of each tensor, and the inverse
* `replicated`: a tree as the first rank has it
* `single_process_mesh`: a mesh of this process alone
* `RankError`: another rank has failed, or ranks are at different places
"""

from vgrad.distributed.loading import local_batches
from vgrad.distributed.members import gather_members, member_range, shard_members
from vgrad.distributed.parallel import data_parallel, replicated, single_process_mesh
from vgrad.distributed.sharding import gather, shard
from vgrad.ranks import RankError
from vgrad.ranks import Ranks as Ranks

__all__ = [
    "RankError",
    "data_parallel",
    "gather",
    "gather_members",
    "local_batches",
    "member_range",
    "replicated",
    "shard",
    "shard_members",
    "single_process_mesh",
]


def __dir__() -> list[str]:
    return __all__
