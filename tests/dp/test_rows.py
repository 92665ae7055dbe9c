"""Rows of embeddings chosen by noisy counts, against a loop of plain autograd."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
        self.words = nn.Embedding(WORDS, 5, padding_idx=PADDING)
        self.places = nn.Embedding(PLACES, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, words, place):
        return self.head(torch.tanh(self.words(words).sum(-2)) + self.places(place))


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(size=SIZE, seed=1):
    """Return samples with padding, one of padding alone, and words that repeat."""
    source = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (size, 4), generator=source)
    words[:, 3] = torch.where(torch.arange(size) % 2 == 0, PADDING, words[:, 0])
    words[:1] = PADDING
    place = torch.randint(PLACES - 1, (size,), generator=source)
    return words, place, torch.randint(3, (size,), generator=source)


def start_state(tx, dtype=torch.float64):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net(dtype))
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    return loss, TrainState.create(tx, params, buffers)._replace(key=KEY)


def counts_by_hand(words, places, counts=None):
    """Return the counts of rows in units of 2^-31, from the samples' own lookups."""
    found = {TABLES[0]: [0] * WORDS, TABLES[1]: [0] * PLACES}
    for row in range(len(words)) if counts is None else counts:
        own = [(TABLES[0], word) for word in {*words[row].tolist()} - {PADDING}]
        own += [(TABLES[1], int(places[row]))]
        for table, number in own:
            found[table][number] += math.isqrt(UNIT**2 // len(own))
    return {name: torch.tensor(each) for name, each in found.items()}


def rows_of(loss, *call, mask=None, **options):
    """Return what a step counts."""
    clipped = ROWS.counting(clipped_grad(loss, max_norm=0.3, **options))
    return clipped(*call, mask=mask).rows


@every_strategy
@pytest.mark.parametrize("passes", [1, 2])
def test_samples_count_at_the_rows_where_they_have_gradients(strategy, passes):
    loss, state = start_state(optim.sgd(0.1), torch.float32)
    words, places, y = batch()
    call = state.params, state.buffers, words, places, y
    expected = counts_by_hand(words, places)
    options = {"strategy": strategy, "passes": passes}
    oracle.assert_exact(rows_of(loss, *call, **options), expected, tolerance=0)
    options |= {"chunk_size": 5, "loss_scale": StaticLossScale(64.0)}
    oracle.assert_exact(rows_of(loss, *call, **options), expected, tolerance=0)
    mask = torch.arange(SIZE) % 3 > 0
    some = counts_by_hand(words, places, mask.nonzero().flatten().tolist())
    oracle.assert_exact(rows_of(loss, *call, mask=mask, **options), some, tolerance=0)
    none = rows_of(loss, *call[:2], words[:0], places[:0], y[:0], **options)
    oracle.assert_exact(none, counts_by_hand(words[:0], places[:0]), tolerance=0)


@every_strategy
def test_a_sample_that_is_not_finite_counts_nowhere(strategy):
    loss, state = start_state(optim.sgd(0.1))
    words, places, y = batch()
    places[2] = PLACES - 1
    state.params[TABLES[1]][PLACES - 1] = torch.inf
    expected = counts_by_hand(words, places, [n for n in range(SIZE) if n != 2])
    call = state.params, state.buffers, words, places, y
    for passes in (1, 2):
        found = rows_of(loss, *call, strategy=strategy, passes=passes)
        oracle.assert_exact(found, expected, tolerance=0)


def test_a_table_that_also_multiplies_counts_where_its_gradient_is_not_zero():
    def loss(params, buffers, x):
        table = params["words.weight"]
        return (F.embedding(x, table) @ table[:4].T).square().sum()

    rows = row_selection(["words*"], threshold=0)
    params = {"words.weight": torch.randn(9, 3)}
    x = torch.tensor([[1, 7], [8, 8]])
    clipped = rows.counting(clipped_grad(loss, max_norm=1.0))
    samples = torch.tensor([2, 2, 2, 2, 0, 0, 0, 1, 1])  # five rows each
    expected = {"words.weight": samples * math.isqrt(UNIT**2 // 5)}
    oracle.assert_exact(clipped(params, {}, x).rows, expected, tolerance=0)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e12, 1e30])
def test_a_sample_moves_counts_by_one_and_sums_by_the_bound(size):
    """Brute force: every sample is left out, and integers are compared."""
    loss, state = start_state(optim.sgd(0.1), torch.float32)

    def sized(params, buffers, *sample):
        return loss(params, buffers, *sample) * size

    words, places, y = batch()
    clipped = ROWS.counting(clipped_grad(sized, max_norm=0.3))
    whole = clipped(state.params, state.buffers, words, places, y)
    for row in range(SIZE):
        rest = torch.arange(SIZE) != row
        other = clipped(state.params, state.buffers, words[rest], places[rest], y[rest])
        moved = [whole.rows[name] - other.rows[name] for name in TABLES]
        assert sum(x * x for each in moved for x in each.tolist()) <= UNIT**2
        alone = clipped(
            state.params, state.buffers, *(x[row : row + 1] for x in (words, places, y))
        )
        found = torch.cat([x.double().flatten() for x in alone.grads.values()])
        assert found.norm() <= 0.3 * (1 + 1e-6)


def test_no_number_of_rows_counts_more_than_one():
    loss = lambda params, buffers, x: (params["table"] * x).sum()  # noqa: E731
    rows = row_selection(["table"], threshold=0)
    clipped = rows.counting(clipped_grad(loss, max_norm=1.0))
    x = torch.ones(400, 400).tril()[..., None]
    found = [
        clipped({"table": torch.ones(400, 1)}, {}, x[row : row + 1]).rows["table"]
        for row in range(400)
    ]
    for count, each in enumerate(found, 1):
        squares = sum(number * number for number in each.tolist())
        assert UNIT**2 * (1 - 1e-7) <= squares <= UNIT**2
        assert len(each.nonzero()) == count


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

    if size := len(words):
        grads = oracle.model_gradients(model, run, (words, places, y), size)
        sums = oracle.clipped(grads, plan.max_norm)
    counts, before, chosen = counts_by_hand(words, places), {}, {}
    for name, p in model.named_parameters():
        total = sums[name] if size else torch.zeros_like(p)
        noise = noise_by_hand(plan, step, name, p.shape, counts=False)
        p.grad = total.detach() / plan.expected_batch_size + noise
        if name not in TABLES:
            continue
        noise = noise_by_hand(plan, step, name, (len(p),), counts=True)
        chosen[name] = counts[name].double() / UNIT + noise >= ROWS.threshold
        p.grad[~chosen[name]] = 0
        slots = {"": p} | {n: x for n, x in optimizer.state[p].items() if x.ndim}
        before[name] = {slot: x.detach().clone() for slot, x in slots.items()}
    optimizer.step()
    for name, p in model.named_parameters():
        for slot, x in {"": p, **optimizer.state[p]}.items():
            if name in TABLES and x is not None and x.ndim:
                zero = torch.zeros_like(x)
                x.data[~chosen[name]] = before[name].get(slot, zero)[~chosen[name]]
    return chosen


OPTIMIZERS = {
    "adamw": (
        optim.adamw(0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
    "momentum": (
        optim.sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True
        ),
    ),
}


@pytest.mark.parametrize("noise", [0.0, 1.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_by_hand(name, noise):
    plan, (tx, of_torch) = replace(PLAN, noise_multiplier=noise), OPTIMIZERS[name]
    loss, state = start_state(tx)
    step, model = private_step(loss, tx, plan), net()
    optimizer = of_torch(model.parameters())
    partly = 0
    for number in range(4):
        samples = batch(0 if number == 2 else SIZE, seed=number)
        state, metrics = step(state, *samples)
        chosen = step_by_hand(plan, model, optimizer, number, *samples)
        some = {n: p.detach() for n, p in model.named_parameters()}
        oracle.assert_exact(state.params, some, tolerance=1e-4 if noise else 1e-9)
        assert metrics["rows"] == sum(int(each.sum()) for each in chosen.values())
        partly += 0 < metrics["rows"] < WORDS + PLACES
    assert partly >= 2


def slots_of(state, name):
    """List the values of a table and of all that is kept for it, row by row."""
    tree = {"params": state.params, "optimizer": state.optimizer}
    leaves = vgrad.tree.state_dict(tree).items()
    return {n: x for n, x in leaves if n.endswith(f"['{name}']") and len(x) > 1}


@pytest.mark.parametrize(
    "tx",
    [
        optim.adam(0.1, weight_decay=0.1, amsgrad=True),
        optim.adafactor(0.1),
        optim.schedule_free(optim.sgd(0.1, momentum=0.9)),
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
        optim.lookahead(optim.adamw(0.1), sync_period=2),
    ],
    ids=["adam", "adafactor", "schedule_free", "chain", "lookahead"],
)
@pytest.mark.parametrize("donate", [False, True])
def test_rows_that_are_not_chosen_keep_every_bit(tx, donate):
    loss, state = start_state(tx)
    step = private_step(loss, tx, PLAN, donate=donate)
    state, _ = step(state, *batch())
    before = {name: slots_of(state, name) for name in TABLES}
    before = {name: {n: x.clone() for n, x in s.items()} for name, s in before.items()}
    after, metrics = step(state, *batch(seed=2))
    moved = {}
    for name in TABLES:
        found = slots_of(after, name)
        assert found.keys() == before[name].keys()
        [params] = [n for n in found if n.startswith("['params")]
        same = (found[params] == before[name][params]).all(1)
        moved[name] = ~same
        for slot, value in found.items():
            assert torch.equal(value[same], before[name][slot][same])
    assert sum(int(each.sum()) for each in moved.values()) <= metrics["rows"]
    assert any(each.any() and not each.all() for each in moved.values())


def test_a_run_goes_on_where_it_was_saved(tmp_path):
    tx = OPTIMIZERS["adamw"][0]
    loss, start = start_state(tx)
    step, state = private_step(loss, tx, PLAN), start
    for number in range(4):
        if number == 2:
            save(tmp_path / "run", state)
        state, _ = step(state, *batch(seed=number))
    again, other = load(tmp_path / "run", start), private_step(loss, tx, PLAN)
    for number in (2, 3):
        again, _ = other(again, *batch(seed=number))
    oracle.assert_exact(again.params, state.params, tolerance=0)
    oracle.assert_exact(again.optimizer, state.optimizer, tolerance=0)


@pytest.mark.parametrize(
    "backend", ["replay", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_steps_choose_the_same_rows(backend):
    plan, tx = replace(PLAN, max_batch_size=20), OPTIMIZERS["adamw"][0]
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


def test_units_count_at_the_rows_of_their_samples():
    plan = replace(PLAN, samples_per_unit=2)
    loss, state = start_state(optim.sgd(0.1))
    words, places, y = (x.view(6, 2, *x.shape[1:]) for x in batch())
    present = torch.tensor([[True, True]] * 5 + [[True, False]])
    samples = words, places, y, present
    counts = plan.rows.counting(
        clipped_grad(dp.unit_loss(loss), max_norm=0.3, normalize_by=1.0)
    )
    found = counts(state.params, state.buffers, *samples).rows[TABLES[0]]
    own = {n: {*words[n][present[n]].flatten().tolist()} - {PADDING} for n in range(6)}
    both = [len(own[n]) + len({*places[n][present[n]].tolist()}) for n in own]
    expected = torch.zeros(WORDS, dtype=torch.int64)
    for n, rows in own.items():
        expected[[*rows]] += math.isqrt(UNIT**2 // both[n])
    assert torch.equal(found, expected)
    private_step(loss, optim.sgd(0.1), plan)(state, *samples)


# The account.


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_both_releases_together_are_one_gaussian_of_the_plan(share):
    """Against the composition of two, in dp_accounting."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    rows = row_selection(TABLES, threshold=2.0, share=share)
    plan = runs.plan(60, 1.0, 0.3, noise=3.0, steps=8, rows=rows)
    both = [rows.count_multiplier(3.0), rows.gradient_multiplier(3.0)]
    assert math.hypot(*(1 / each for each in both)) == pytest.approx(1 / 3.0, rel=1e-12)
    events = [dp_accounting.GaussianDpEvent(each) for each in both]
    account = PLDAccountant()
    account.compose(dp_accounting.ComposedDpEvent(events), plan.steps)
    expected = account.get_epsilon(plan.delta)
    assert plan.epsilon() == pytest.approx(expected, rel=1e-3)
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
    expected = 2.0 * whole / ratio
    assert rows.gradient_multiplier(2.0) == pytest.approx(expected, rel=1e-12)


def test_noise_has_the_deviations_that_the_account_is_for():
    plan = replace(PLAN, rows=row_selection(["w"], threshold=0.0, share=0.2))
    sensitivity = clipped_grad(
        lambda p, b, x: p["w"] @ x, max_norm=0.3, normalize_by=12.0
    ).sensitivity
    place = {"key": KEY, "step": 3}
    noise = plan.step_noise(sensitivity, dp.noise.Streams(), **place)
    drawn = noise.added({"w": torch.zeros(40_000)})["w"]
    expected = 1.3 / 0.8**0.5 * 0.3 / 12
    assert drawn.std().item() == pytest.approx(expected, rel=0.02)
    # A count of -1 is chosen with the probability that its noise is above 1.
    counts = {"w": torch.full((40_000,), -UNIT)}
    chosen = plan.chosen_rows(counts, dp.noise.Streams(), **place)["w"]
    probability = 0.5 * math.erfc(0.2**0.5 / 1.3 / 2**0.5)
    assert chosen.double().mean().item() == pytest.approx(probability, abs=0.01)
    assert abs(torch.corrcoef(torch.stack([drawn, chosen.float()]))[0, 1]) < 0.02


def test_a_plan_with_rows_is_numbers_and_another_run():
    again = dp.Plan(**json.loads(json.dumps(asdict(PLAN))))
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    others = [replace(ROWS, share=0.3), replace(ROWS, threshold=1.0), None]
    others.append(replace(ROWS, tables=["words.weight"]))
    plans = [PLAN, *(replace(PLAN, rows=rows) for rows in others)]
    assert len({bytes(plan.digest.numpy()) for plan in plans}) == len(plans)
    keys = {tuple(plan._subkey(KEY).tolist()) for plan in plans}
    assert len(keys) == len(plans)
    budget = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5, "batch_size": 100}
    plain, chosen = (
        dp.Plan.for_epsilon(2.0, epochs=2, rows=rows, **budget) for rows in (None, ROWS)
    )
    assert plain.noise_multiplier == chosen.noise_multiplier


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tables": "words"}, TypeError, r"Write \['words'\]"),
        ({"tables": []}, ValueError, "a pattern"),
        ({"threshold": math.nan}, ValueError, "finite"),
        ({"share": 0}, ValueError, "0 < share < 1"),
        ({"share": 1.0}, ValueError, "0 < share < 1"),
    ],
)
def test_numbers_outside_of_their_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        row_selection(**{"tables": ["w"], "threshold": 1.0} | options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"noise": noising.bisr(4), "sampling": "fixed_order"},
            "adapts and chosen rows",
        ),
        ({"discrete": True}, "adapts and chosen rows"),
        (
            {"max_norm": quantile_clip(count_deviation=5.0)},
            "adapts and chosen rows",
        ),
    ],
)
def test_combinations_without_an_account_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **{"sampling": None, "neighbours": None} | fields)
    with pytest.raises(TypeError, match="dp.row_selection"):
        replace(PLAN, rows=["words.weight"])


def test_what_would_move_other_rows_is_refused():
    for tx in (
        optim.adam_bc(0.1, deviation=PLAN.deviation),
        optim.scale_then_privatize(optim.adam(0.1)),
    ):
        loss, state = start_state(tx)
        with pytest.raises(ValueError, match="deviation on all rows"):
            private_step(loss, tx, PLAN)(state, *batch())
    sums, sensitivity = {"w": torch.zeros(3)}, vgrad.Sensitivity(0.3 / 12)
    with pytest.raises(ValueError, match="private_step alone"):
        PLAN.add_noise(sums, sensitivity, key=KEY, step=0)
    plan = replace(PLAN, rows=row_selection(["word"], threshold=1))
    loss, state = start_state(optim.sgd(0.1))
    with pytest.raises(ValueError, match="a pattern that matches a parameter"):
        private_step(loss, optim.sgd(0.1), plan)(state, *batch())
