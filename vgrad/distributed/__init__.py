"""Samples, parameters and members over the ranks of torch.distributed."""

from vgrad.distributed.ranks import RankError as RankError
from vgrad.distributed.ranks import Ranks as Ranks
from vgrad.distributed.sharded import sharded_call as sharded_call
from vgrad.distributed.sharding import gather as gather
from vgrad.distributed.sharding import shard as shard
