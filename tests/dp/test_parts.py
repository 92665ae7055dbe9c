"""Noise on the parts of a tensor is the noise on the whole, bit for bit."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from vgrad import Sensitivity
from vgrad.dp import Plan, add_gaussian_noise, noise, secret_key

BLOCK = 2**16
SUM = Sensitivity(0.5)


def noised(sums, noise_multiplier=1.5, **changed):
    given = {"key": secret_key(seed=0), "step": 3} | changed
    return add_gaussian_noise(sums, SUM, noise_multiplier=noise_multiplier, **given)


@st.composite
def cut(draw):
    """Draw a shape, and where each of its dimensions is cut; parts may be empty."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    cuts = [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape]
    edges = [[0, *sorted(c), n] for c, n in zip(cuts, shape, strict=True)]
    return tuple(shape), list(itertools.product(*map(itertools.pairwise, edges)))


@given(cut(), st.integers(1, 40))
def test_parts_take_their_own_numbers_of_every_block(case, size):
    shape, boxes = case
    total = math.prod(shape)
    whole = np.arange(total).reshape(shape)
    for box in boxes:
        low, high = [a for a, _ in box], [b for _, b in box]
        sizes = tuple(b - a for a, b in box)
        found = np.full(math.prod(sizes), -1)
        numbers = []
        for share in noise.block_parts(noise.Part(shape, tuple(low), sizes), size):
            block = np.arange(total)[share.number * size :][:size]
            assert share.count == len(block)
            found[share.entries] = block[share.places]
            numbers.append(share.number)
        expected = whole[tuple(map(slice, low, high))].reshape(-1)
        assert np.array_equal(found, expected)
        # No block is drawn twice, or for nothing.
        assert numbers == sorted(set((expected // size).tolist()))


@pytest.fixture(autouse=True)
def group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def as_rank(rank, sizes):
    """Be one rank of a mesh; what ranks send one another is lost."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    count = math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    return init_device_mesh("cpu", sizes)


def placed(full, mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def placements(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = {"R": Replicate(), "P": Partial()}
    return [kinds.get(each) or Shard(int(each)) for each in text]


CASES = {
    "rows": ((3,), "0", (5, 7)),
    "columns": ((3,), "1", (5, 7)),
    "fewer rows than ranks": ((4,), "0", (2, 3)),
    "copies": ((3,), "R", (5, 7)),
    "rows and columns": ((2, 3), "01", (5, 7)),
    "columns, then rows": ((2, 3), "10", (5, 7)),
    "rows twice": ((2, 2), "00", (9, 2)),
    "rows of copies": ((2, 2), "R0", (9, 2)),
    "several blocks": ((3,), "0", (5, BLOCK // 2)),
    "columns of several blocks": ((3,), "1", (5, BLOCK // 2)),
    "kernels": ((2, 2), "13", (4, 6, 3, 3)),
    "none": ((2,), "0", (0, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("graph", [False, True])
def test_every_rank_adds_its_part_of_the_noise(name, graph):
    sizes, text, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    full = {"a": torch.randn(shape, generator=generator), "b": torch.zeros(3)}
    expected = noised(full)["a"]
    found = torch.full(shape, math.nan)
    for rank in range(math.prod(sizes)):
        total = placed(full["a"], as_rank(rank, sizes), placements(text))
        if graph:
            total.requires_grad_()
        noisy = noised({"a": total, "b": full["b"]})["a"]
        assert noisy.requires_grad == graph
        assert noisy.placements == total.placements
        assert noisy.shape == total.shape
        assert noisy.stride() == total.stride()
        # The place of a part, as torch sees it: where it puts the numbers of the whole.
        order = torch.arange(float(math.prod(shape))).view(shape)
        place = placed(order, total.device_mesh, total.placements).to_local().long()
        found.view(-1)[place.flatten()] = noisy.to_local().detach().flatten()
        assert torch.equal(noisy.to_local(), expected.flatten()[place])
    assert torch.equal(found, expected)


def test_equal_seeds_give_shards_equal_noise_in_torch_and_their_own_here():
    """Shards of a CPU mesh draw the same numbers in torch: pytorch/pytorch#138329."""
    torchs, own = [], []
    for rank in range(2):
        zeros = placed(torch.zeros(4, 50), as_rank(rank, (2,)), placements("0"))
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="random operators"):
            torchs.append(torch.zeros_like(zeros).normal_().to_local())
        own.append(noised({"a": zeros})["a"].to_local())
    assert torch.equal(*torchs)
    assert not bool((own[0] == own[1]).any())
    assert len(torch.cat(own).unique()) == 200


def test_the_transpose_of_a_shard_gets_the_noise_of_its_shape():
    full = torch.randn(6, 4)
    total = placed(full, as_rank(1, (2,)), placements("0")).T
    noisy = noised({"a": total})["a"]
    assert noisy.placements == tuple(placements("1"))
    assert noisy.stride() == (6, 1)
    assert noisy.to_local().is_contiguous()
    assert torch.equal(noisy.to_local(), noised({"a": full.T})["a"][:, 3:])


def test_a_noise_multiplier_of_zero_leaves_shards_as_they_are():
    total = placed(torch.randn(5, 2).half(), as_rank(1, (2,)), placements("0"))
    noisy = noised({"a": total}, noise_multiplier=0)["a"]
    assert noisy.placements == total.placements
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy.to_local(), total.to_local().float())


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_terms_of_a_sum_are_refused(noise_multiplier):
    from torch.distributed.tensor import DTensor

    mesh = as_rank(0, (2, 2))
    total = DTensor.from_local(torch.ones(2), mesh, placements("0P"), run_check=False)
    with pytest.raises(TypeError, match=r"sums\['a'\]\): expected .*got \[Partial"):
        noised({"a": total}, noise_multiplier=noise_multiplier)


def test_plans_add_noise_to_shards():
    plan = Plan(100, 0.1, noise_multiplier=1.0, max_norm=1.0, steps=5, delta=1e-3)
    full, key = torch.randn(5, 3), secret_key(seed=1)
    given = {"sensitivity": Sensitivity(0.1), "key": key, "step": 2}
    expected = plan.add_noise({"a": full}, **given)["a"]
    total = placed(full, as_rank(1, (2,)), placements("0"))
    noisy = plan.add_noise({"a": total}, **given)["a"]
    assert torch.equal(noisy.to_local(), expected[3:])
