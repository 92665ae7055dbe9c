"""Samples, parameters and members over the ranks of torch.distributed."""

from vgrad.distributed.checkpoints import gathered as gathered
from vgrad.distributed.checkpoints import load_checkpoint as load_checkpoint
from vgrad.distributed.checkpoints import save_checkpoint as save_checkpoint
from vgrad.distributed.ranks import RankError as RankError
from vgrad.distributed.ranks import Ranks as Ranks
