"""What ranks do together."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from vgrad.distributed import RankError, Ranks


def here(size, axis="dp"):
    return Ranks.of(
        "test", init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), axis
    )


def _summed(size):
    ranks = here(size)
    own = torch.full((3,), 1.0 + ranks.rank)
    parts = {
        "a": own,
        "b": own.double().view(3, 1),
        "large": torch.full((2**21,), float(ranks.rank)),
        "c": torch.tensor([1 + 2j * ranks.rank]),
    }
    if ranks.rank:  # the order of names is that of each rank
        parts = dict(reversed(parts.items()))
    found = ranks.summed("test", parts)
    assert torch.equal(own, torch.full((3,), 1.0 + ranks.rank))
    return {name: value[:1].flatten() for name, value in found.items()}


def test_sums_are_those_of_all_ranks(some):
    total = sum(range(some.size))
    for found in some.run(_summed, some.size):
        assert found["a"].item() == found["b"].item() == total + some.size
        assert found["b"].dtype == torch.float64
        assert found["large"].item() == total
        assert found["c"].item() == complex(some.size, 2 * total)


def _one_fails(size, mark):
    ranks = here(size)
    try:
        with ranks.together("the sum"):
            if ranks.rank == 1:
                raise ValueError("expected good data, got bad data" + 3000 * mark)
    except (ValueError, RankError) as error:
        return type(error).__name__, str(error)[:80]


@pytest.mark.parametrize("mark", ["!", "\0", "\N{GRINNING FACE}"])
def test_an_error_of_one_rank_is_one_on_all(some, mark):
    for rank, (kind, text) in enumerate(some.run(_one_fails, some.size, mark)):
        if rank == 1:
            assert (kind, text[:13]) == ("ValueError", "expected good")
        else:
            expected = "the sum: rank 1 stopped with ValueError: expected good data"
            assert (kind, text[: len(expected)]) == ("RankError", expected)


def _lost(size):
    ranks = here(size)
    with pytest.raises(RankError, match="rank 0 at noise, 1 at the sum"):
        ranks.agree("noise" if ranks.rank == 0 else "the sum")
    with pytest.raises(RankError, match=r"same key on all ranks, got \[0, 1"):
        ranks.check_same("a step", plan="one", key=ranks.rank)
    with pytest.raises(RankError, match="expected the same layout"):
        ranks.summed("test", {"w": torch.ones(2 + ranks.rank)})
    return [each["size"] for each in ranks.agree("sizes", size=ranks.rank)]


def test_ranks_that_are_at_different_places_raise(some):
    found = some.run(_lost, some.size)
    assert found == some.size * [list(range(some.size))]
