"""Noise that is correlated over steps: its numbers, its history, and its parts."""

import functools
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests import oracle, streams
from tests.dp.runs import KEY, private
from tests.dp.test_noise import as_rank, group, placed, placements
from vgrad import Sensitivity, optim, tree
from vgrad.dp import Plan, noising, quantile_clip, secret_key
from vgrad.dp import noise as gaussian
from vgrad.training import TrainState, load, private_step, release, save, train_step

__all__ = ["group"]  # a fixture: no process group stays

MULTIPLIER, SENSITIVITY = 1.5, 0.4
SIGMA = MULTIPLIER * SENSITIVITY

# The first columns of C^-1, and filters that have them.
FILTERS = {
    "draws": noising.Filter(draws=(1.0, -0.5, -0.125, -0.0625)),
    "draws, scaled": noising.Filter(draws=(0.75, -0.5, 0.25)),
    "feedback": noising.Filter(feedback=(0.8, 0.4, 0.3, 0.1)),
    "one before": noising.Filter(feedback=(1.0, 0.5)),
    "decays": noising.Filter(decays=(0.9, 0.3), scales=(0.2, 0.4)),
}
KINDS = [(name, False) for name in FILTERS]
KINDS += [("draws", True), ("draws, scaled", True)]


def inverse(filter, count):
    """Return C^-1, by the definition of each kind of filter."""
    column = np.zeros(count)
    if filter.feedback:
        column[: len(filter.feedback)] = filter.feedback[:count]
    elif filter.decays:
        powers = np.arange(count - 1)
        sums = zip(filter.scales, filter.decays, strict=True)
        column[0] = 1
        column[1:] = sum(scale * decay**powers for scale, decay in sums)
    else:
        column[: len(filter.draws)] = filter.draws[:count]
    rows, columns = np.indices((count, count))
    matrix = np.where(rows >= columns, column[rows - columns], 0)
    of_c = filter.feedback or filter.decays
    return np.linalg.inv(matrix) if of_c else matrix


def noise_at(step, name="draws", cached=False, **changed):
    options = {"noise_multiplier": MULTIPLIER, "key": KEY, "history": ()}
    options |= {"filter": FILTERS[name]._replace(cached=cached), "step": step} | changed
    size = Sensitivity(options.pop("sensitivity", SENSITIVITY))
    return gaussian.gaussian_noise("f", size, **options)


def run(sums, steps, *kind, start=(), **changed):
    """Return the noisy sums of some steps of a run, and its last history."""
    held, found, history = gaussian.Streams(), [], start
    for step in steps:
        own = {"streams": held, "history": history} | changed
        noisy, history = noise_at(step, *kind, **own).advanced(sums)
        found.append(noisy)
    return found, history


SHAPES = {"a": (250, 3), "b": (7,), "c": (), "d": (3, 0)}


def sums_of(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


@functools.cache
def draws(name, shape, steps, key=KEY):
    """Return the unit normal numbers of steps, `[steps, *shape]`."""
    own = {"multiplier": 1.0, "sensitivity": 1.0, "tags": ["unit"]}
    found = (streams.noise(key.tolist(), s, name, shape, **own) for s in steps)
    return torch.stack([*found]).numpy()


def graph(noise, sums):
    drawn = noise.drawn(sums)
    noisy, made = drawn.advanced(sums)
    return noisy, noise.after(sums, drawn.buffers, made)


def by_tensors(noise, sums):
    """Draw as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "is_host", lambda device: False)
        patch.setattr(gaussian, "ON_DEVICE", 2**14)  # of several steps
        return noise.advanced(sums)


WAYS = {"host": gaussian.Noise.advanced, "graph": graph, "device": by_tensors}


@pytest.mark.parametrize(
    ("way", "first"), [("host", 0), ("host", 5), ("graph", 5), ("device", 0)]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_noise_is_the_inverse_of_c_times_all_draws(kind, way, first, monkeypatch):
    """Before it is rounded: the grid is much finer here."""
    monkeypatch.setattr(gaussian, "_GRID", 2.0**-45)
    sums, held, history, found = sums_of(), gaussian.Streams(), (), []
    steps = range(first, first + 50)
    for step in steps:
        own = {"streams": held, "history": history, "first": first}
        noisy, history = WAYS[way](noise_at(step, *kind, **own), sums)
        found.append(noisy)
    matrix = inverse(FILTERS[kind[0]], len(steps))
    for name, total in sums.items():
        expected = np.tensordot(matrix, draws(name, total.shape, steps), 1) * SIGMA
        added = torch.stack([each[name] - total for each in found])
        assert np.allclose(added, expected, rtol=0, atol=1e-12)


def test_noise_is_rounded_to_the_grid_of_its_deviation():
    for kind in KINDS:
        for noisy in run(sums_of(), range(6), *kind)[0]:
            for value in noisy.values():
                steps = value / 2.0**-17
                assert torch.equal(steps.round(), steps)


def test_filters_of_one_number_are_independent_noise():
    sums = sums_of()
    for filter in (noising.Filter((1.0,)), noising.Filter(feedback=(1.0,))):
        for step in range(3):
            noise = noise_at(step, filter=filter)
            expected = noise_at(step, filter=gaussian.INDEPENDENT).added(sums)
            noisy, history = noise.advanced(sums)
            oracle.assert_exact(noisy, expected, 0)
            assert history == ()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_noise_of_a_graph_and_of_a_device_is_that_of_the_host(kind):
    sums = sums_of(torch.float32)
    expected, last = run(sums, range(6), *kind)
    for way in (graph, by_tensors):
        held, history = gaussian.Streams(), ()
        for step, noisy in enumerate(expected):
            noise = noise_at(step, *kind, streams=held, history=history)
            found, history = way(noise, sums)
            oracle.assert_exact(found, noisy, 0)
        oracle.assert_exact(history.buffers, last.buffers, 1e-12)


def test_old_buffers_are_neither_copied_nor_changed():
    sums, (_, history) = sums_of(), run(sums_of(), range(2), "feedback")
    before = tree.copied(history)
    _, after = noise_at(2, "feedback", history=history).advanced(sums)
    oracle.assert_exact(history, before, 0)
    for old, new in zip(history.buffers, after.buffers[1:], strict=False):
        assert all(old[name] is new[name] for name in sums)
    assert {x.dtype for x in after.buffers[0].values()} == {torch.float64}


# The cache.


def test_cached_draws_are_drawn_once_and_are_no_state(monkeypatch):
    sums, counted, words = sums_of(), [], gaussian._Layout.words
    monkeypatch.setattr(
        gaussian._Layout, "words", lambda *a: counted.append(a[2]) or words(*a)
    )
    expected, history = run(sums, range(8), "draws")
    assert len(counted) == 1 + 2 + 3 + 5 * 4
    counted.clear()
    found, cached = run(sums, range(8), "draws", True)
    assert counted == [*range(8)]
    oracle.assert_exact(found, expected, 0)
    oracle.assert_exact(cached, history, 0)
    assert cached.buffers == ()
    counted.clear()
    found, _ = run(sums, range(8, 10), "draws", True, start=history)
    assert counted == [5, 6, 7, 8, 9]  # those that are lost, once more
    oracle.assert_exact(found, run(sums, range(8, 10), "draws", start=history)[0], 0)


def test_a_cache_is_of_one_run_and_one_step():
    held, sums = gaussian.Streams(), sums_of()
    own, other = {"streams": held}, {"streams": held, "key": secret_key(seed=1)}
    small = {"a": torch.zeros(5)}
    _, history = run(sums, range(5), "draws", True, **own)
    _, theirs = run(sums, range(5), "draws", **other)
    for total, start, kept in (
        *((sums, history, own), (sums, theirs, other), (sums, history, own)),
        *((small, history, own), (sums, history, own), (sums, history, own)),
    ):
        found, _ = run(total, [5], "draws", True, start=start, **kept)
        expected, _ = run(total, [5], "draws", start=start, **{**kept, "streams": None})
        oracle.assert_exact(found, expected, 0)
    assert pickle.loads(pickle.dumps(held)).cache == (None, ())


# Deviations that change from step to step.


@pytest.mark.parametrize("way", WAYS)
def test_a_deviation_may_be_a_tensor(way):
    sums = sums_of()
    held = gaussian.Streams()
    for step, bound in enumerate((0.3, 7.5, 2.0**-30, 1.0)):
        size = torch.tensor(bound, dtype=torch.float64)
        options = {"filter": gaussian.INDEPENDENT, "sensitivity": size}
        noise = noise_at(step, streams=held, **options)
        found, _ = WAYS[way](noise, sums)
        deviation = MULTIPLIER * bound
        grid = 2.0 ** math.floor(math.log2(deviation / 2**16))
        for name, total in sums.items():
            exact = (
                total + torch.tensor(draws(name, total.shape, (step,))[0]) * deviation
            )
            assert torch.equal(found[name], (exact / grid).round() * grid + 0.0)


@pytest.mark.parametrize("number", [1.0, 0.75, 1 - 2.0**-53, 1.5e-270, 3e38, 2.0**40])
def test_the_grid_of_a_tensor_is_that_of_a_number(number):
    found = gaussian._grid(torch.tensor(number, dtype=torch.float64))
    assert float(found) == gaussian._grid(number)
    assert 0.5 < float(found) / (number * 2.0**-16) <= 1


# Parts.


@pytest.mark.parametrize(
    ("kind", "sizes", "text"),
    [(KINDS[0], (2,), "0"), (KINDS[2], (4,), "1")]
    + [(kind, (2, 2), "R0") for kind in KINDS],
    ids=str,
)
def test_every_rank_adds_its_part_of_the_noise(kind, sizes, text):
    full = {"a": torch.randn(9, 6), "b": torch.zeros(3)}
    expected, last = run(full, range(6), *kind)
    for rank in range(math.prod(sizes)):
        mesh = as_rank(rank, sizes)
        total = placed(full["a"], mesh, placements(text))
        found, history = run({"a": total, "b": full["b"]}, range(6), *kind)
        for noisy, whole in zip(found, expected, strict=True):
            part = placed(whole["a"], mesh, placements(text))
            assert torch.equal(noisy["a"].to_local(), part.to_local())
            assert torch.equal(noisy["b"], whole["b"])
        for buffer, whole in zip(history.buffers, last.buffers, strict=True):
            part = placed(whole["a"], mesh, placements(text))
            assert buffer["a"].placements == total.placements
            oracle.assert_exact(buffer["a"].to_local(), part.to_local(), 1e-14)
        if history.buffers:
            with pytest.raises(ValueError, match="Shard a state as a whole"):
                run(full, [6], *kind, start=history)


# Plans and runs.

SCHEMES = {
    "independent": noising.independent(),
    "bisr": noising.bisr(3),
    "bisr, cached": noising.bisr(3, cache=True),
    "band_inv_mf": noising.band_inv_mf(3),
    "band_mf": noising.band_mf(3),
    "blt": noising.blt(2),
    "coefficients": noising.from_coefficients([1.0, 0.5, 0.25]),
}
CORRELATED = [*SCHEMES][1:]
STEPS = 8
DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": torch.ones(3, 4), "b": torch.zeros(())}
ADAM = optim.adam(0.1)


def loss(params, buffers, x):
    return (params["w"] @ x).square().sum() + params["b"]


def plan_of(name, steps=STEPS, **changed):
    run = {"noise_multiplier": 0.7, "max_norm": 1.0, "steps": steps, "delta": 1e-3}
    return Plan(40, 0.1, **run, noise=SCHEMES[name], **changed)


def start():
    return TrainState.create(ADAM, PARAMS, {}, seed=0)


def steps_of(plan, state=None, count=STEPS, wrap=lambda step: step, **options):
    """Take steps of a plan; return the states, the first one included."""
    step, states = wrap(private_step(loss, ADAM, plan, **options)), [state or start()]
    for rows, _ in zip(plan.sampler(states[0]), range(count), strict=False):
        states.append(step(states[-1], DATA[rows])[0])
    return states


@pytest.mark.parametrize("name", SCHEMES)
def test_the_noise_of_a_run_has_the_sensitivity_of_its_scheme(name, monkeypatch):
    monkeypatch.setattr(gaussian, "_GRID", 2.0**-45)
    plan, tx = plan_of(name, 50), optim.sgd(1.0)
    params = {"w": torch.zeros(30, dtype=torch.float64)}
    step = private_step(lambda p, b, x: 0 * p["w"].sum(), tx, plan)
    state, released = TrainState.create(tx, params, {}, seed=0), []
    for _ in range(50):
        before = state.params["w"]
        state, _ = step(state, DATA[:4])
        released.append(before - state.params["w"])
    rows, columns = np.indices((50, 50))
    first = plan.fitted.column(50)
    matrix = np.where(rows >= columns, first[rows - columns], 0)
    size = 0.7 * plan.fitted.sensitivity() / plan.expected_batch_size
    own = plan._subkey(state.key)
    if name == "independent":
        tags = {"multiplier": 0.7, "sensitivity": 1 / plan.expected_batch_size}
        noise = (streams.noise(own.tolist(), t, "w", (30,), **tags) for t in range(50))
        unit = torch.stack([*noise]).numpy() / size
    else:
        unit = draws("w", (30,), range(50), own)
    expected = np.linalg.solve(matrix, unit) * size
    assert np.allclose(torch.stack(released), expected, rtol=0, atol=1e-11)
    norms = np.linalg.norm(np.linalg.inv(matrix), axis=1)
    scale = size * norms[[0, 3, 49]]
    assert np.allclose([plan.deviation(t) for t in (0, 3, 49)], scale)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_run_stopped_at_any_step_goes_on_with_the_same_bits(name, tmp_path):
    plan = plan_of(name)
    states = steps_of(plan)
    for state in states[:-1]:
        save(tmp_path / "run", state)
        like = TrainState.create(ADAM, PARAMS, {})
        resumed = load(tmp_path / "run", like)
        assert like.noise == ()
        oracle.assert_exact(steps_of(plan, resumed)[-1], states[-1], 0)
    assert (states[-1].noise != ()) == (name != "independent")


@pytest.mark.parametrize("name", CORRELATED)
def test_donated_and_replayed_steps_are_the_same(name):
    expected = steps_of(plan_of(name))
    replayed = functools.partial(vgrad.compile, fallback="error", batch_sizes=[8])
    for options in ({"donate": True}, {"wrap": replayed}):
        state = tree.copied(start())
        found = steps_of(plan_of(name), state, **options)[-1]
        oracle.assert_exact(found.params, expected[-1].params, 1e-6)
        oracle.assert_exact(found.noise, expected[-1].noise, 0)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "donate"),
    [(name, bool(number % 2)) for number, name in enumerate(CORRELATED)],
)
def test_compiled_steps_add_the_noise_of_eager_ones_in_one_capture(name, donate):
    expected, made = steps_of(plan_of(name)), []

    def wrap(step):
        options = {"backend": "inductor", "batch_sizes": [8], "fallback": "error"}
        made.append(vgrad.compile(step, **options))
        return made[0]

    state = tree.copied(start())
    found = steps_of(plan_of(name), state, wrap=wrap, donate=donate)[-1]
    for key, value in expected[-1].params.items():
        torch.testing.assert_close(found.params[key], value)
    oracle.assert_exact(found.noise.buffers, expected[-1].noise.buffers, 1e-12)
    names = [each.name for each in made[0].reports()]
    assert len(names) == len({*names}) == 2


@pytest.mark.parametrize("name", CORRELATED)
def test_private_gradients_are_those_of_private_step(name):
    """Also when they are stopped, and go on from their state."""
    data = TensorDataset(DATA, torch.arange(40) % 3)
    plan, torch_model = plan_of(name), nn.Linear(4, 3)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(torch_model)
    tx = optim.sgd(0.1)
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, plan)
    state = TrainState.create(tx, params, buffers)._replace(key=KEY)
    run = private(plan, torch_model, data)
    optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    while run.step < STEPS:
        for x, y in run.loader:
            state, _ = step(state, x, y)
            run.backward(x, y)
            optimizer.step()
            found = dict(torch_model.named_parameters())
            oracle.assert_exact(found, state.params, 1e-6)
            torch_model.zero_grad()
            saved = run.state_dict()
            assert plain(saved)
            run = private(plan, torch_model, data, key=secret_key())
            run.load_state_dict(saved)
            if run.step < STEPS:
                other = dict(saved, key=secret_key(seed=3))
                with pytest.raises(ValueError, match="one of another key or plan"):
                    private(plan, torch_model, data).load_state_dict(other)
                del saved["noise"]
                with pytest.raises(ValueError, match="got none"):
                    private(plan, torch_model, data).load_state_dict(saved)
            break


def plain(value):
    """Return whether a file of torch can hold a value with `weights_only`."""
    if isinstance(value, dict | list | tuple):
        entries = value.values() if isinstance(value, dict) else value
        return type(value) in (dict, list, tuple) and all(map(plain, entries))
    return type(value) in (int, float, str, bool, type(None), torch.Tensor)


# Secrets.


def test_nothing_that_is_shown_or_released_has_a_history(tmp_path):
    plan = plan_of("blt")
    state = steps_of(plan, count=3)[-1]
    assert "noise=NoiseHistory(<secret>)" in repr(state)
    assert repr(state.noise) == "NoiseHistory(<secret>)"
    noise = plan.step_noise(
        Sensitivity(0.25),
        gaussian.Streams(),
        key=state.key,
        step=3,
        history=state.noise,
    )
    assert "history" not in repr(noise)
    release(tmp_path / "model", state, plan)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.safetensors",
        "privacy.json",
    }
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model" / "model.safetensors").keys() == PARAMS.keys()


# Refusals.


@pytest.mark.parametrize("name", ["bisr, cached", "band_mf", "blt"])
def test_a_history_of_another_run_is_refused(name):
    plan, states = plan_of(name), steps_of(plan_of(name))
    third = states[3]
    step = private_step(loss, ADAM, plan)
    for changed, match in (
        ({"noise": ()}, "the history of noise that 3 steps .* got none"),
        ({"noise": states[2].noise}, "got one of 2 steps"),
        ({"key": secret_key(seed=1)}, "got one of another key or plan"),
        ({"step": third.step + 1}, "got one of 3 steps"),
    ):
        with pytest.raises(ValueError, match=match):
            step(third._replace(**changed), DATA[:4])
    with pytest.raises(ValueError, match="got one of 3 steps"):
        step(plain_step(third), DATA[:4])
    if third.noise.buffers:
        short = third.noise._replace(buffers=third.noise.buffers[:-1])
        with pytest.raises(ValueError, match="buffers, got one of"):
            step(third._replace(noise=short), DATA[:4])
        other = ({"w": torch.zeros(3, 4)}, *third.noise.buffers[1:])
        with pytest.raises(ValueError, match="missing: 'b'"):
            step(third._replace(noise=third.noise._replace(buffers=other)), DATA[:4])


def plain_step(state):
    return train_step(lambda p, b, x: p["w"].sum(), ADAM)(state, DATA[:4])[0]


@pytest.mark.parametrize("name", ["independent", "bisr"])
def test_a_run_whose_noise_or_bound_goes_on_starts_without_plain_steps(name):
    state, bound = plain_step(start()), quantile_clip(count_deviation=2.0)
    plan = plan_of(name)
    plan = replace(plan, max_norm=bound) if name == "independent" else plan
    step = private_step(loss, ADAM, plan)
    with pytest.raises(ValueError, match=r"plain steps. Start .*TrainState\.create"):
        step(state, DATA[:4])
    step(TrainState.create(ADAM, state.params, state.buffers), DATA[:4])
    private_step(loss, ADAM, plan_of("independent"))(state, DATA[:4])


@pytest.mark.parametrize("name", ["bisr, cached", "blt"])
def test_a_fork_needs_a_plan_that_begins_with_it(name):
    plan, states = plan_of(name), steps_of(plan_of(name))
    assert states[0].fork().noise == ()
    with pytest.raises(ValueError, match=r"fork\(plan\): expected a plan that begins"):
        states[3].fork()
    with pytest.raises(ValueError, match="got one after 0 steps"):
        states[3].fork(plan)
    with pytest.raises(ValueError, match="Pass the number of steps"):
        states[3].fork(plan_of(name, 2).after(plan, 2))
    with pytest.raises(ValueError, match="got one that has spent under another"):
        states[3].fork(plan_of(name, 2).after(plan_of(name, 9), 3))
    second = plan_of(name, 4).after(plan, 3)
    forked = states[3].fork(second)
    assert not torch.equal(forked.key, states[3].key)
    assert forked.noise == ()
    # A new stream: the first noise is that of the first row.
    own = {"key": forked.key, "step": 3, "history": ()}
    noise = second.step_noise(Sensitivity(0.25), gaussian.Streams(), **own)
    sums = {"w": torch.zeros(30, dtype=torch.float64)}
    unit = draws("w", (30,), (3,), second._subkey(forked.key))[0]
    found, _ = noise.advanced(sums)
    expected = unit * second.deviation(3)
    assert np.allclose(found["w"], expected, rtol=0, atol=2**-15 * second.deviation(3))
    ends = [steps_of(second, state, 4)[-1] for state in (forked, states[3])]
    assert not torch.equal(ends[0].params["w"], ends[1].params["w"])
    assert [int(each.step) for each in ends] == [7, 7]


def test_noise_that_needs_buffers_is_in_no_function_of_key_and_step_alone():
    sums = {"w": torch.zeros(3)}
    for name in ("band_mf", "blt"):
        with pytest.raises(ValueError, match="private_step and PrivateGradients keep"):
            plan_of(name).add_noise(sums, Sensitivity(0.25), key=KEY, step=0)
    for name in ("bisr", "bisr, cached", "band_inv_mf"):
        plan, history = plan_of(name), ()
        for step in range(4):
            own = {"key": KEY, "step": step}
            noise = plan.step_noise(
                Sensitivity(0.25), gaussian.Streams(), **own, history=history
            )
            expected, history = noise.advanced(sums)
            found = plan.add_noise(sums, Sensitivity(0.25), **own)
            oracle.assert_exact(found, expected, 0)
