"""A release holds parameters, buffers and a claim of privacy, and nothing else."""

import copy
import dataclasses
import json
import re

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests.optim.problems import stacked
from tests.oracle import assert_exact
from vgrad import distributed, files, optim
from vgrad.dp import Plan, PrivateGradients, noising, secret_key
from vgrad.training import (
    EnsembleState,
    TrainState,
    private_step,
    release,
    save,
    train_step,
)

# The quicker accountant: no test here is about its numbers.
PLAN = Plan(60, 0.5, 1.0, max_norm=1.0, steps=5, delta=1e-3, accountant="rdp")
DATA = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.o = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.o(self.b(torch.tanh(self.a(x)))) * self.scale.float()


def private(steps=3, plan=PLAN, state=None):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Tied())
    tx = optim.adam(0.1)
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, plan)
    state = state or TrainState.create(tx, params, buffers, seed=1)
    for rows, _ in zip(plan.sampler(state), range(steps), strict=False):
        state, _ = step(state, DATA[rows], LABELS[rows])
    return state, fmodel


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def claim_of(folder):
    return json.loads((folder / "privacy.json").read_text())


def test_a_release_has_tensors_and_the_claim_alone(tmp_path):
    (state, fmodel), folder, x = private(), tmp_path / "new" / "model", DATA[:3]
    before = copy.deepcopy(state)
    release(folder, state, PLAN)
    assert_exact(state, before, 0)
    assert torch.equal(state.key, secret_key(seed=1))
    assert contents(folder).keys() == {"model.safetensors", "privacy.json"}
    tensors = load_file(folder / "model.safetensors")
    assert_exact(tensors, {**state.params, **state.buffers}, 0)
    assert claim_of(folder) == {
        "epsilon": PLAN.epsilon(3),
        "delta": 1e-3,
        "mu": PLAN.mu(3),
        "mu_from_false_positive_rate": 1e-12,
        "neighbours": "add_or_remove_one",
        "mechanism": "Gaussian noise on clipped sums of Poisson batches",
        "steps": 3,
        "account": [{"sampling_rate": 0.5, "noise_multiplier": 1.0, "steps": 3}],
        "accountant": "rdp",
    }
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"format", "privacy"}
    assert json.loads(metadata["privacy"]) == claim_of(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "model.safetensors").stat().st_mode & 0o444
    module = Tied()
    load_model(module, folder / "model.safetensors", strict=False)
    assert_exact(module(x), fmodel(state.params, state.buffers, x), 0)


def test_no_byte_of_the_key_or_the_optimizer_is_in_a_release(tmp_path):
    state, _ = private()
    release(tmp_path / "a", state, PLAN)
    save(tmp_path / "state", state)
    everything = b"".join(contents(tmp_path / "a").values())
    moments = [m for m in vgrad.tree.tensors(state.optimizer) if m.numel() > 3]
    secrets = [each.numpy().tobytes() for each in (state.key, *moments)]
    assert secrets[0] in b"".join(contents(tmp_path / "state").values())
    for secret in (*secrets, state.plan_digest.numpy().tobytes()):
        assert secret not in everything
    for word in ("key", "loss", "digest", "dataset", "optimizer"):
        assert word.encode() not in contents(tmp_path / "a")["privacy.json"]
    # A difference between states of one release changes nothing in it.
    other = state.fork()._replace(optimizer=())
    release(tmp_path / "b", other, dataclasses.replace(PLAN, steps=9, max_norm=1))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_file_is_the_same_bytes_each_time():
    metadata = {str(number): "x" * number for number in range(20)}
    dtypes = [torch.float32, torch.int8]
    tensors = {
        f"n{7 * i % 31}": torch.full((i % 3,), i, dtype=dtypes[i % 2])
        for i in range(31)
    }
    orders = [tensors.items(), sorted(tensors.items()), reversed(tensors.items())]
    (content,) = {
        b"".join(files.serialized("file", dict(order), metadata)) for order in orders
    }
    assert_exact(safetensors.torch.load(content), tensors, 0)


def test_the_claim_counts_plans_before(tmp_path):
    state, _ = private(2)
    then = dataclasses.replace(PLAN, noise_multiplier=2.0).after(PLAN, 2)
    release(tmp_path / "begun", state, then)
    claim = claim_of(tmp_path / "begun")
    assert claim["epsilon"] == PLAN.epsilon(2)
    assert [each["steps"] for each in claim["account"]] == [2]
    state, _ = private(5, then, state)
    release(tmp_path / "ended", state, then)
    claim = claim_of(tmp_path / "ended")
    assert claim["epsilon"] == then.epsilon() > PLAN.epsilon(2)
    account = [(each["noise_multiplier"], each["steps"]) for each in claim["account"]]
    assert account == [(1.0, 2), (2.0, 5)]


@pytest.mark.parametrize(
    ("changes", "mechanism", "more"),
    [
        ({"neighbours": "zero_out"}, "Gaussian noise on clipped sums of Poisson", {}),
        (
            {"max_batch_size": 40},
            "Gaussian noise on clipped sums of Poisson batches",
            {"largest_batch": 40},
        ),
        (
            {"noise": noising.bisr(2)},
            r"Gaussian noise correlated by bisr\(2\) on clipped sums of batches in a",
            {},
        ),
        (
            {"noise": noising.band_mf(2), "sampling": "cyclic_equal"},
            r"Gaussian noise correlated by band_mf\(2\) on clipped sums of cyclic",
            {},
        ),
        ({"discrete": "sum"}, "Discrete Gaussian noise on clipped sums", {}),
    ],
)
def test_the_claim_is_about_the_relation_and_the_mechanism_of_the_plan(
    changes, mechanism, more, tmp_path
):
    fresh = {"sampling": None, "neighbours": None, "accountant": "pld"}
    plan = dataclasses.replace(PLAN, **fresh | changes)
    state, _ = private(2, plan)
    release(tmp_path / "new", state, plan)
    claim = claim_of(tmp_path / "new")
    assert (claim["neighbours"], claim["epsilon"]) == (plan.neighbours, plan.epsilon(2))
    assert re.match(mechanism, claim["mechanism"])
    [term] = claim["account"]
    assert term.keys() == {"sampling_rate", "noise_multiplier", "steps", *more}
    assert {name: term[name] for name in more} == more
    assert "60" not in json.dumps(
        claim | {"epsilon": 0, "mu": 0}
    )  # the size of the data set


def test_the_claim_of_persons_says_so(tmp_path):
    plan = dataclasses.replace(PLAN, dataset_size=30, samples_per_unit=2)
    data = TensorDataset(DATA, LABELS)
    units = [row // 2 for row in range(60)]
    run = PrivateGradients(Tied(), F.cross_entropy, data, plan=plan, units=units)
    run.backward(*next(iter(run.loader)))
    release(tmp_path / "new", run)
    assert claim_of(tmp_path / "new")["unit"].startswith("a person or group, at most 2")


def test_private_gradients_have_a_plan(tmp_path):
    module = Tied()
    module.o.bias.requires_grad_(False)
    data = TensorDataset(DATA, LABELS)
    run = PrivateGradients(module, F.cross_entropy, data, plan=PLAN)
    with pytest.raises(ValueError, match="got one that has taken none, of which"):
        release(tmp_path / "none", run)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad])
    for batch in run.loader:
        run.backward(*batch)
        optimizer.step()
    with pytest.raises(TypeError, match="expected no plan beside a PrivateGradients"):
        release(tmp_path / "none", run, PLAN)
    release(tmp_path / "model", run)
    expected = dict(module.state_dict())
    del expected["b.weight"]
    assert_exact(load_file(tmp_path / "model" / "model.safetensors"), expected, 0)
    claim = claim_of(tmp_path / "model")
    assert (claim["steps"], claim["epsilon"]) == (2, run.epsilon())
    again = Tied()
    load_model(again, tmp_path / "model" / "model.safetensors")
    assert_exact(again(DATA), module(DATA), 0)


def plain():
    loss = lambda params, buffers: params["a.weight"].sum()  # noqa: E731
    return train_step(loss, optim.adam(0.1))(private(0)[0])[0]


MEMBERS = EnsembleState.create(optim.sgd(0.1), {"w": torch.zeros(2, 3)}, {})
SILENT = dataclasses.replace(PLAN, noise_multiplier=0.0)
LOUD, SHORT = (
    dataclasses.replace(PLAN, **c) for c in ({"noise_multiplier": 2.0}, {"steps": 1})
)
REFUSED = [
    (lambda: private(1)[0], None, "the dp.Plan under which .* got a NoneType"),
    (lambda: private(1)[0], 3.0, "the dp.Plan under which .* got a float"),
    (lambda: MEMBERS, PLAN, "the TrainState of a private run, .* EnsembleState"),
    (dict, PLAN, "expected the TrainState of .* got a dict"),
    (
        lambda: stacked([private(1)[0]] * 2),
        PLAN,
        r"got several that are stacked, \(2,\)",
    ),
    (lambda: private(1)[0], LOUD, "has spent under another"),
    (lambda: private(0)[0], PLAN, "has taken none, of which there is nothing"),
    (plain, PLAN, "has taken none, of which there is nothing"),
    (lambda: private(2)[0], SHORT, "at most the 1 steps of the plan"),
    (lambda: private(1, SILENT)[0], SILENT, "expected a plan of a finite eps"),
]


@pytest.mark.parametrize(("state", "plan", "message"), REFUSED)
def test_what_is_no_private_run_is_refused(state, plan, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        release(tmp_path / "model", state(), plan)
    assert not list(tmp_path.iterdir())


def test_shards_are_refused_and_gathered(tmp_path):
    state, _ = private(1)
    with distributed.single_process_mesh("dp") as mesh:
        cut = state._replace(params=distributed.shard(state.params, mesh))
        with pytest.raises(TypeError, match="got a DTensor in 'a.weight'. Pass dist"):
            release(tmp_path / "model", cut, PLAN)
        release(tmp_path / "model", distributed.gather(cut, mesh), PLAN)
    release(tmp_path / "plain", state, PLAN)
    assert contents(tmp_path / "model") == contents(tmp_path / "plain")


def test_a_folder_with_anything_in_it_stays_as_it_is(tmp_path):
    state, _ = private(1)
    (tmp_path / "empty").mkdir()
    release(tmp_path / "empty", state, PLAN)
    (tmp_path / "file").write_text("here")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    save(tmp_path / "run", state)
    before = sorted(tmp_path.rglob("*"))
    for name in ("empty", "file", "link", "run"):
        with pytest.raises(FileExistsError, match=f"{name}: expected a new or an emp"):
            release(tmp_path / name, state, PLAN)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_release_is_whole_or_not_there(tmp_path, monkeypatch):
    state, _ = private(1)
    real, calls = files.replace, []

    def failing(path, *content, **options):
        calls.append(path.name)
        if len(calls) == 2:
            raise OSError("no space left")
        real(path, *content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", failing)
        with pytest.raises(OSError, match="no space left"):
            release(tmp_path / "model", state, PLAN)
    assert calls == ["model.safetensors", "privacy.json"]
    assert not list(tmp_path.iterdir())
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "left").write_text("by a process that was killed")
    release(tmp_path / "model", state, PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(contents(tmp_path / "model")) == 2
