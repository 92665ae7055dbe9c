"""What `bench.floor` counts is what is timed."""

from functools import partial

import torch

from bench import floor
from bench.contenders import CLIPPED, plain
from bench.models import SETTINGS


def test_the_clipped_sum_has_the_operations_of_plain_sgd():
    problem = SETTINGS["mlp"].problem("cpu", torch.float32, 8)
    base, clipped = (
        floor.cost(partial(build(problem), *problem.batch)).operations
        for build in (plain, CLIPPED["vgrad"].build)
    )
    assert base <= clipped < 1.01 * base
