"""Ops that are taken apart: recorded, with the numbers of a loop over samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.persample.test_rules import (
    SHORT,
    SIZES,
    Index,
    called,
    case,
    check_gradients,
    check_low_precision,
    check_quantities,
    fixed,
    ops_of,
    recorded,
)
from tests.persample.test_rules import (
    one_thread as one_thread,
)

# Torch loops over samples under its own vmap, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")

HIGH, WIDTH = 7, 3


def bags(mode="mean", shape=(2, 5), **options):
    """Reduce the rows of each row of an index."""

    def op(w, i):
        return F.embedding_bag(i, w, mode=mode, **options)

    return case(op, [(HIGH, WIDTH)], [Index(HIGH, shape)], "Rows")


def ragged(mode="mean", offsets=(0, 2, 2, 4), **options):
    """Reduce what lies between the offsets of a long index."""

    def op(w, i):
        return F.embedding_bag(i, w, torch.tensor(offsets), mode=mode, **options)

    return case(op, [(HIGH, WIDTH)], [Index(HIGH, (6,))], "Rows")


def scaled(w, s, i):
    return F.embedding_bag(i, w, mode="sum", per_sample_weights=s, padding_idx=1)


def ragged_and_scaled(w, s, i):
    offsets = torch.tensor([0, 1, 4])
    return F.embedding_bag(i, w, offsets, mode="sum", per_sample_weights=s)


TABLE = [(HIGH, WIDTH)]
CASES = {
    f"{kind.__name__}, {mode}{', padded' * padded}": kind(
        mode, **{"padding_idx": -2} if padded else {}
    )
    for kind in (bags, ragged)
    for mode in ("sum", "mean", "max")
    for padded in (False, True)
}
CASES |= {
    "bags, long": bags("max", shape=(3, 40)),
    "ragged, last offset": ragged(offsets=(0, 1, 1, 6), include_last_offset=True),
    "ragged, offsets of the sample": case(
        lambda w, i, o: F.embedding_bag(i, w, o.cumsum(0) - o[0], mode="max"),
        TABLE,
        [Index(HIGH, (6,)), Index(2, (4,))],
        "Rows",
    ),
    "scaled": case(scaled, [*TABLE, (2, 5)], [Index(HIGH, (2, 5))], "Rows Dense"),
    "scaled, ragged": case(
        ragged_and_scaled, [*TABLE, (6,)], [Index(HIGH, (6,))], "Rows Dense"
    ),
    "scaled by data": case(
        lambda w, i, s: scaled(w, s, i), TABLE, [Index(HIGH, (2, 5)), (2, 5)], "Rows"
    ),
    "scaled, table frozen": case(
        lambda s, i: scaled(fixed(s, HIGH, WIDTH), s, i),
        [(2, 5)],
        [Index(HIGH, (2, 5))],
        "Dense",
    ),
    "two tables in one": case(
        lambda w, i: (
            F.embedding_bag(i, w[:4], mode="sum").sin()
            + F.embedding_bag(i, w[3:], mode="max")
        ),
        TABLE,
        [Index(4, (2, 5))],
        "Rows",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_every_quantity_equals_that_of_a_loop(name, strategy):
    check_quantities(CASES[name], strategy, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bags, sum", "ragged, max", "scaled"])
def test_quantities_are_right_in_lower_precision(name, dtype):
    check_low_precision(CASES[name], 5, dtype)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_recorded_without_expanding_them(name):
    made = CASES[name]
    for use in recorded(made).uses:
        (param,) = use.names
        kind = type(use.factor).__name__
        assert kind == made.kinds[param]
        assert use.ruled == (kind == "Rows")  # weights of rows are one number a row


def test_every_composite_op_has_a_case():
    assert ops_of("vgrad.persample.rules.embedding") <= {
        F.embedding,
        *called(CASES.values()),
    }


def test_of_equal_rows_the_first_has_the_gradient_of_the_largest():
    def loss(params, buffers, i):
        return F.embedding_bag(i, params["w"], mode="max").exp().sum()

    params = {"w": torch.zeros(HIGH, WIDTH, dtype=torch.float64)}
    _, batch = bags().data(3)
    found = vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, *batch)
    assert oracle.error(found, oracle.loss_gradients(loss, params, {}, batch, 3)) == 0


def test_what_is_not_taken_apart_is_expanded():
    by_frequency = ragged("sum", scale_grad_by_freq=True)
    empty = case(
        lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 0])).exp(),
        TABLE,
        [Index(HIGH, (0,))],
        "Dense",
    )
    for made in (by_frequency, empty):
        assert not any(use.ruled for use in recorded(made).uses)
        check_quantities(made, "recorded", 2)


@SHORT
@given(
    size=SIZES,
    mode=st.sampled_from(["sum", "mean", "max"]),
    starts=st.lists(st.integers(0, 6), max_size=4),
    padding=st.sampled_from([None, 0, 3, -1]),
    include_last_offset=st.booleans(),
)
def test_bags_of_any_lengths(size, mode, starts, padding, include_last_offset):
    offsets = [0, *sorted(starts), *[6] * include_last_offset]
    options = {"padding_idx": padding, "include_last_offset": include_last_offset}
    check_gradients(ragged(mode, offsets, **options), size)
