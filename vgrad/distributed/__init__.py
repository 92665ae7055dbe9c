"""Samples, parameters and members over the ranks of torch.distributed.

The result does not depend on how many ranks there are.
"""

from vgrad.distributed.checkpoints import gathered as gathered
from vgrad.distributed.checkpoints import load_checkpoint as load_checkpoint
from vgrad.distributed.checkpoints import save_checkpoint as save_checkpoint
from vgrad.distributed.data_parallel import data_parallel as data_parallel
from vgrad.distributed.loading import LocalBatches as LocalBatches
from vgrad.distributed.loading import local_batches as local_batches
from vgrad.distributed.ranks import RankError as RankError
from vgrad.distributed.ranks import Ranks as Ranks
from vgrad.distributed.stepping import replicated as replicated
