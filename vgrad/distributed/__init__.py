"""Samples, parameters and members over the ranks of torch.distributed."""

from vgrad.distributed.alone import alone as alone
from vgrad.distributed.member_parallel import member_parallel as member_parallel
from vgrad.distributed.own_members import all_members as all_members
from vgrad.distributed.own_members import member_range as member_range
from vgrad.distributed.own_members import own_members as own_members
from vgrad.distributed.predictions import predict as predict
from vgrad.distributed.predictions import predict_values as predict_values
from vgrad.distributed.ranks import RankError as RankError
from vgrad.distributed.ranks import Ranks as Ranks
