"""Samples, parameters and members over the ranks of torch.distributed.

The result does not depend on how many ranks there are.
"""

from vgrad.distributed.alone import alone as alone
from vgrad.distributed.checkpoints import gather as gather
from vgrad.distributed.checkpoints import load_checkpoint as load_checkpoint
from vgrad.distributed.checkpoints import save_checkpoint as save_checkpoint
from vgrad.distributed.data_parallel import data_parallel as data_parallel
from vgrad.distributed.loading import LocalBatches as LocalBatches
from vgrad.distributed.loading import local_batches as local_batches
from vgrad.distributed.member_parallel import member_parallel as member_parallel
from vgrad.distributed.own_members import all_members as all_members
from vgrad.distributed.own_members import member_range as member_range
from vgrad.distributed.own_members import own_members as own_members
from vgrad.distributed.predictions import predict as predict
from vgrad.distributed.predictions import predict_values as predict_values
from vgrad.distributed.ranks import RankError as RankError
from vgrad.distributed.ranks import Ranks as Ranks
from vgrad.distributed.sharding import shard as shard
from vgrad.distributed.stepping import replicated as replicated
