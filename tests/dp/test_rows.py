"""Rows of embeddings chosen by noisy counts, against a loop of plain autograd."""

import json
import math
from dataclasses import asdict, replace

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle, streams
from tests.dp import runs
from tests.dp.runs import KEY
from tests.losses import every_strategy
from vgrad import clipped_grad, dp, optim
from vgrad.dp import noising, quantile_clip, row_selection
from vgrad.precision import StaticLossScale
from vgrad.training import TrainState, load, private_step, save

WORDS, PLACES, PADDING, SIZE = 30, 7, 3, 12
UNIT = 2**31
"""The integer for a count of one."""

TABLES = ["words.weight", "places.weight"]
ROWS = row_selection(TABLES, threshold=0.9, share=0.2)
PLAN = runs.plan(60, 0.2, 0.3, noise=1.3, steps=8, rows=ROWS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 9, padding_idx=PADDING)
        self.places = nn.Embedding(PLACES, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, words, place):
        return self.head(torch.tanh(self.words(words).sum(-2)) + self.places(place))


def net():
    torch.manual_seed(0)
    return Net().double()


def batch(size=SIZE, seed=1):
    """Return samples with padding, one of padding alone, and words that repeat."""
    source = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (size, 4), generator=source)
    words[:, 3] = torch.where(torch.arange(size) % 2 == 0, PADDING, words[:, 0])
    words[:1] = PADDING
    place = torch.randint(PLACES - 1, (size,), generator=source)
    return words, place, torch.randint(3, (size,), generator=source)


def start_state(tx):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net())
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    return loss, TrainState.create(tx, params, buffers)._replace(key=KEY)


def counts_by_hand(words, places, samples=None):
    """Return the counts of rows in units of 2^-31, from the samples' own lookups."""
    found = {TABLES[0]: [0] * WORDS, TABLES[1]: [0] * PLACES}
    for row in range(len(words)) if samples is None else samples:
        own = [(TABLES[0], word) for word in {*words[row].flatten().tolist()}]
        own += [(TABLES[1], place) for place in {*places[row].flatten().tolist()}]
        own = [each for each in own if each != (TABLES[0], PADDING)]
        for table, number in own:
            found[table][number] += math.isqrt(UNIT**2 // len(own))
    return {name: torch.tensor(each) for name, each in found.items()}


def counting(loss, rows=ROWS, **options):
    return rows.counting(clipped_grad(loss, max_norm=0.3, **options))


@every_strategy
@pytest.mark.parametrize("passes", [1, 2])
def test_samples_count_at_the_rows_where_they_have_gradients(strategy, passes):
    loss, state = start_state(optim.sgd(0.1))
    words, places, y = batch()
    call = state.params, state.buffers, words, places, y
    mask = torch.arange(SIZE) % 3 > 0
    some = counts_by_hand(words, places, mask.nonzero().flatten().tolist())
    for more in ({}, {"chunk_size": 5, "loss_scale": StaticLossScale(64.0)}):
        count = counting(loss, strategy=strategy, passes=passes, **more)
        expected = counts_by_hand(words, places)
        oracle.assert_exact(count(*call).rows, expected, tolerance=0)
        oracle.assert_exact(count(*call, mask=mask).rows, some, tolerance=0)
        none = count(*call[:2], words[:0], places[:0], y[:0]).rows
        oracle.assert_exact(none, counts_by_hand(words, places, []), tolerance=0)


@every_strategy
def test_a_sample_that_is_not_finite_counts_nowhere(strategy):
    loss, state = start_state(optim.sgd(0.1))

    def spoiled(params, buffers, words, place, y):
        return loss(params, buffers, words, place, y) * torch.where(
            place == PLACES - 1, math.nan, 1.0
        )

    words, places, y = batch()
    places[2] = PLACES - 1
    expected = counts_by_hand(words, places, [n for n in range(SIZE) if n != 2])
    for passes in (1, 2):
        count = counting(spoiled, strategy=strategy, passes=passes)
        result = count(state.params, state.buffers, words, places, y)
        assert result.nonfinite == 1
        oracle.assert_exact(result.rows, expected, tolerance=0)


def test_counts_are_of_the_gradients_that_are_summed():
    """Also where a checkpoint draws anew, and samples run once more."""

    def loss(params, buffers, x):
        rows = F.embedding(x, params["table"])
        drop = lambda rows: F.dropout(rows, 0.5)  # noqa: E731
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(drop, rows, **options).sum()

    rows = row_selection(["table"], threshold=0)
    count = counting(loss, rows, passes=2, randomness="different", strategy="recorded")
    params, x = {"table": torch.ones(40, 1)}, torch.arange(40)[None]
    with pytest.warns(vgrad.FallbackWarning, match="two backward passes"):
        results = [count(params, {}, x) for _ in range(5)]
    for result in results:
        grads, counts = result.grads["table"][:, 0], result.rows["table"]
        assert 0 < counts.count_nonzero() < 40
        assert torch.equal(counts != 0, grads != 0)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e30])
def test_a_sample_moves_counts_by_one_and_sums_by_the_bound(size):
    """Brute force: every sample is left out, and integers are compared."""
    loss, state = start_state(optim.sgd(0.1))
    count = counting(lambda *call: loss(*call) * size)
    samples, fixed = batch(), (state.params, state.buffers)
    whole = count(*fixed, *samples)
    for row in range(SIZE):
        rest = torch.arange(SIZE) != row
        other = count(*fixed, *(x[rest] for x in samples))
        moved = [whole.rows[name] - other.rows[name] for name in TABLES]
        assert sum(x * x for each in moved for x in each.tolist()) <= UNIT**2
        moved = [whole.grads[name] - other.grads[name] for name in whole.grads]
        moved = torch.cat([x.flatten() for x in moved])
        assert moved.norm() <= 0.3 * (1 + 1e-6)


def test_no_number_of_rows_counts_more_than_one():
    rows = row_selection(["table"], threshold=0)
    count = counting(lambda params, buffers, x: (params["table"] * x).sum(), rows)
    for number, x in enumerate(torch.ones(300, 300).tril(), 1):
        found = count({"table": torch.ones(300)}, {}, x[None]).rows["table"].tolist()
        assert UNIT**2 * (1 - 1e-7) <= sum(each * each for each in found) <= UNIT**2
        assert found == [found[0]] * number + [0] * (300 - number)
    infinite = count({"table": torch.ones(300)}, {}, torch.full((1, 300), math.inf))
    assert not infinite.rows["table"].any()


def test_units_count_at_the_rows_of_their_samples():
    """Copies that fill a unit up have no gradient."""
    loss, state = start_state(optim.sgd(0.1))
    words, places, y = (x.view(6, 2, *x.shape[1:]) for x in batch())
    present = torch.tensor([[True, True]] * 5 + [[True, False]])
    samples = words.clone(), places.clone(), y, present
    words[5, 1], places[5, 1] = words[5, 0], places[5, 0]
    found = counting(dp.unit_loss(loss))(state.params, state.buffers, *samples).rows
    oracle.assert_exact(found, counts_by_hand(words, places), tolerance=0)
    plan = replace(PLAN, samples_per_unit=2)
    private_step(loss, optim.sgd(0.1), plan)(state, *samples)


# Steps.


def noise_by_hand(plan, step, name, shape, *, counts):
    """Return the noise on counts, or on gradients."""
    key, z = plan._subkey(KEY).tolist(), plan.noise_multiplier
    if counts:
        key, own = streams.digest(key, ("rows",), 32), (z / ROWS.share**0.5, 1.0)
    else:
        own = z / (1 - ROWS.share) ** 0.5, plan.max_norm / plan.expected_batch_size
    sizes = dict(zip(("multiplier", "sensitivity"), own, strict=True))
    return streams.noise(key, step, name, shape, **sizes) if z else 0.0


def step_by_hand(plan, model, optimizer, step, words, places, y):
    """Take a step of torch's optimizer, and put the rows that are not chosen back."""

    def run(model, words, places, y):
        return F.cross_entropy(model(words, places), y)

    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    if len(words):
        found = oracle.model_gradients(model, run, (words, places, y), len(words))
        sums = oracle.clipped(found, plan.max_norm)
    counts, before, chosen = counts_by_hand(words, places), {}, {}
    for name, p in model.named_parameters():
        noise = noise_by_hand(plan, step, name, p.shape, counts=False)
        p.grad = sums[name].detach() / plan.expected_batch_size + noise
        if name in TABLES:
            noise = noise_by_hand(plan, step, name, (len(p),), counts=True)
            chosen[name] = counts[name].double() / UNIT + noise >= ROWS.threshold
            p.grad[~chosen[name]] = 0
            slots = {"": p, **optimizer.state[p]}
            before[name] = {slot: x.detach().clone() for slot, x in slots.items()}
    optimizer.step()
    tables = {name: p for name, p in model.named_parameters() if name in TABLES}
    for name, p in tables.items():
        for slot, x in {"": p, **optimizer.state[p]}.items():
            if x.ndim:
                old = before[name].get(slot, torch.zeros_like(x))
                x.data[~chosen[name]] = old[~chosen[name]]
    return sum(int(rows.sum()) for rows in chosen.values())


DECAY = {"lr": 0.05, "weight_decay": 0.1}
MOMENTUM = {**DECAY, "momentum": 0.9, "nesterov": True}
OPTIMIZERS = {
    "adamw": (optim.adamw(**DECAY), lambda p: torch.optim.AdamW(p, **DECAY)),
    "sgd": (optim.sgd(**MOMENTUM), lambda p: torch.optim.SGD(p, **MOMENTUM)),
}


@pytest.mark.parametrize("noise", [0.0, 1.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_by_hand(name, noise):
    plan, (tx, of_torch) = replace(PLAN, noise_multiplier=noise), OPTIMIZERS[name]
    loss, state = start_state(tx)
    step, model = private_step(loss, tx, plan), net()
    optimizer, found = of_torch(model.parameters()), []
    for number in range(4):
        samples = batch(0 if number == 2 else SIZE, seed=number)
        state, metrics = step(state, *samples)
        found.append(step_by_hand(plan, model, optimizer, number, *samples))
        assert metrics["rows"] == found[-1]
        params = {n: p.detach() for n, p in model.named_parameters()}
        oracle.assert_exact(state.params, params, tolerance=1e-4 if noise else 1e-9)
    assert all(0 < count < WORDS + PLACES for count in found[:2])
    assert (found[2] > 0) == (noise > 0)  # of the empty batch


def slots_of(state, name):
    """List a table, and all that the optimizer keeps for its rows."""
    leaves = vgrad.tree.state_dict([state.params, state.optimizer]).items()
    return {n: x.clone() for n, x in leaves if f"['{name}']" in n and len(x) > 1}


@pytest.mark.parametrize(
    ("tx", "donate"),
    [
        (optim.adam(0.1, weight_decay=0.1, amsgrad=True), True),
        (optim.adafactor(0.1), False),
        (optim.schedule_free(optim.sgd(0.1, momentum=0.9)), False),
    ],
    ids=["adam", "adafactor", "schedule_free"],
)
def test_rows_that_are_not_chosen_keep_every_bit(tx, donate):
    loss, state = start_state(tx)
    step = private_step(loss, tx, PLAN, donate=donate)
    state, _ = step(state, *batch())
    before = {name: slots_of(state, name) for name in TABLES}
    state, metrics = step(state, *batch(seed=2))
    left = 0
    for name, old in before.items():
        new = slots_of(state, name)
        params, *_ = ((new[slot] != old[slot]).any(1) for slot in old)
        assert all(torch.equal(new[s][~params], old[s][~params]) for s in old)
        left += int((~params).sum())
    assert 0 < left == WORDS + PLACES - metrics["rows"]


def test_the_norm_of_all_gradients_is_without_dropped_rows():
    tx = optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(1.0))
    loss, state = start_state(tx)
    after, _ = private_step(loss, tx, PLAN)(state, *batch())
    moved = [(after.params[n] - x).flatten() for n, x in state.params.items()]
    assert torch.cat(moved).norm() == pytest.approx(1e-3, rel=1e-5)


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    tx, _ = OPTIMIZERS["adamw"]
    loss, start = start_state(tx)
    step, state = private_step(loss, tx, PLAN), start
    for number in range(3):
        if number == 1:
            save(tmp_path / "run", state)
        state, _ = step(state, *batch(seed=number))
    again, other = load(tmp_path / "run", start), private_step(loss, tx, PLAN)
    for number in (1, 2):
        again, _ = other(again, *batch(seed=number))
    oracle.assert_exact(again.params, state.params, tolerance=0)
    oracle.assert_exact(again.optimizer, state.optimizer, tolerance=0)


COMPILER = pytest.mark.slow, pytest.mark.compiled


@pytest.mark.parametrize(
    "backend", ["replay", pytest.param("inductor", marks=COMPILER)]
)
def test_compiled_steps_choose_the_same_rows(backend):
    plan, (tx, _) = replace(PLAN, max_batch_size=20), OPTIMIZERS["adamw"]
    loss, state = start_state(tx)
    plain = private_step(loss, tx, plan, passes=2)
    compiled = vgrad.compile(private_step(loss, tx, plan), backend=backend)
    ours = theirs = state
    for number in range(3):
        samples = batch(SIZE - number, seed=number)
        ours, found = compiled(ours, *samples)
        theirs, expected = plain(theirs, *samples)
        assert found["rows"] == expected["rows"]
        oracle.assert_exact(ours.params, theirs.params, tolerance=1e-4)
    names = [report.name for report in compiled.reports()]
    assert len(names) == len({*names}), compiled.explain(state)
    assert all(report.redos == 0 for report in compiled.reports())


def test_an_audit_sees_no_more_than_the_claim():
    loss, state = start_state(optim.sgd(0.1))
    plan = replace(PLAN, rows=replace(ROWS, threshold=0.0))
    step = private_step(loss, optim.sgd(0.1), plan)
    result = plan.audit(step, state, canaries=160, significance=1e-3, seed=0)
    assert not result.exceeded


# The account.


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_both_releases_together_are_one_gaussian_of_the_plan(share):
    """Against the composition of two, in dp_accounting."""
    rows = row_selection(TABLES, threshold=2.0, share=share)
    plan = runs.plan(60, 1.0, 0.3, noise=3.0, steps=8, rows=rows)
    both = [rows.count_multiplier(3.0), rows.gradient_multiplier(3.0)]
    events = [dp_accounting.GaussianDpEvent(each) for each in both]
    account = PLDAccountant().compose(dp_accounting.ComposedDpEvent(events), plan.steps)
    assert plan.epsilon() == pytest.approx(account.get_epsilon(plan.delta), rel=1e-3)
    assert plan.epsilon() == replace(plan, rows=None).epsilon()
    assert plan.dp_event() == replace(plan, rows=None).dp_event()
    deviation = both[1] * 0.3 / plan.expected_batch_size
    assert plan.deviation(3) == pytest.approx(deviation, rel=1e-12)


def test_the_split_is_that_of_tf_privacy():
    """sparse_noise_utils.split_noise_multiplier, tensorflow/privacy 7a3451c."""
    ratio = 0.3 / 0.7  # of the fraction 0.3
    whole = (1 + ratio**2) ** 0.5
    rows = row_selection(["w"], threshold=1, share=1 / whole**2)
    assert rows.count_multiplier(2.0) == pytest.approx(2.0 * whole, rel=1e-12)
    found = rows.gradient_multiplier(2.0)
    assert found == pytest.approx(2.0 * whole / ratio, rel=1e-12)


def test_noise_has_the_deviations_that_the_account_is_for():
    place = {"streams": dp.noise.Streams(), "key": KEY, "step": 3}
    noise = PLAN.step_noise(vgrad.Sensitivity(0.3 / 12), **place)
    drawn = noise.added({"w": torch.zeros(40_000)})["w"]
    expected = 1.3 / 0.8**0.5 * 0.3 / 12
    assert drawn.std().item() == pytest.approx(expected, rel=0.02)
    # A count of -1 is chosen if its noise is at least 1.9.
    chosen = PLAN.chosen_rows({"w": torch.full((40_000,), -UNIT)}, **place)["w"]
    probability = 0.5 * math.erfc(1.9 * 0.2**0.5 / 1.3 / 2**0.5)
    assert chosen.double().mean().item() == pytest.approx(probability, abs=0.01)
    assert abs(torch.corrcoef(torch.stack([drawn, chosen.float()]))[0, 1]) < 0.02


def test_a_plan_with_rows_is_numbers_and_another_run():
    again = dp.Plan(**json.loads(json.dumps(asdict(PLAN))))
    assert again == PLAN
    rows = [replace(ROWS, share=0.3), replace(ROWS, threshold=1), None]
    rows.append(replace(ROWS, tables=["words.weight"]))
    plans = [PLAN, *(replace(PLAN, rows=each) for each in rows)]
    assert len({bytes(plan.digest.numpy()) for plan in plans}) == len(plans)
    assert len({bytes(plan._subkey(KEY).numpy()) for plan in plans}) == len(plans)
    budget = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5, "batch_size": 100}
    plain, chosen = (
        dp.Plan.for_epsilon(2.0, epochs=2, rows=rows, **budget) for rows in (None, ROWS)
    )
    assert plain.noise_multiplier == chosen.noise_multiplier


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": "words"}, r"Write \['words'\]"),
        ({"tables": []}, "a pattern"),
        ({"threshold": math.nan}, "finite"),
        ({"share": 0}, "0 < share < 1"),
        ({"share": 1.0}, "0 < share < 1"),
    ],
)
def test_numbers_outside_of_their_range_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        row_selection(**{"tables": ["w"], "threshold": 1.0} | options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"noise": noising.bisr(4), "sampling": "fixed_order"},
            "adapts and chosen rows",
        ),
        ({"discrete": True}, "adapts and chosen rows"),
        ({"max_norm": quantile_clip(count_deviation=5.0)}, "adapts and chosen rows"),
        ({"rows": TABLES}, "dp.row_selection"),
    ],
)
def test_combinations_without_an_account_are_refused(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(PLAN, **{"sampling": None, "neighbours": None} | fields)


def test_what_would_move_other_rows_is_refused():
    def step(tx, plan=PLAN):
        loss, state = start_state(tx)
        return private_step(loss, tx, plan)(state, *batch())

    bias_corrected = optim.adam_bc(0.1, deviation=PLAN.deviation)
    for tx in (bias_corrected, optim.scale_then_privatize(optim.adam(0.1))):
        with pytest.raises(ValueError, match="deviation on all rows"):
            step(tx)
    with pytest.raises(ValueError, match="private_step alone"):
        PLAN.add_noise({"w": torch.zeros(3)}, vgrad.Sensitivity(0.1), key=KEY, step=0)
    with pytest.raises(ValueError, match="a pattern that matches a parameter"):
        step(optim.sgd(0.1), replace(PLAN, rows=replace(ROWS, tables=["word"])))
    with pytest.raises(ValueError, match=r"take training.private_step"):
        runs.private(PLAN, net(), torch.utils.data.TensorDataset(torch.zeros(60, 4)))
    rows = row_selection(["scale"], threshold=0)
    count = counting(lambda params, buffers, x: params["scale"] * x, rows)
    with pytest.raises(ValueError, match="without dimensions"):
        count({"scale": torch.tensor(1.0)}, {}, torch.ones(2))
