"""A release holds parameters, buffers and a claim of privacy, and nothing else."""

import copy
import dataclasses
import json
import os

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests.oracle import assert_exact
from vgrad import files, optim
from vgrad.dp import Plan, PrivateGradients, secret_key
from vgrad.training import (
    EnsembleState,
    TrainState,
    private_step,
    release,
    save,
    train_step,
)

PLAN = Plan(60, 0.5, 1.0, max_norm=1.0, steps=5, delta=1e-3)
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


def private(steps=3, plan=PLAN, seed=1):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Tied())
    tx = optim.adam(0.1)
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, plan)
    state = TrainState.create(tx, params, buffers, seed=seed)
    for rows, _ in zip(plan.sampler(state), range(steps), strict=False):
        state, _ = step(state, DATA[rows], LABELS[rows])
    return state, fmodel


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_release_has_tensors_and_the_claim_alone(tmp_path):
    state, fmodel = private()
    release(tmp_path / "new" / "model", state, PLAN)
    folder = tmp_path / "new" / "model"
    assert contents(folder).keys() == {"model.safetensors", "privacy.json"}
    held = load_file(folder / "model.safetensors")
    assert_exact(held, {**state.params, **state.buffers}, 0)
    assert held["scale"].dtype == torch.bfloat16
    claim = json.loads((folder / "privacy.json").read_text())
    assert claim == {
        "epsilon": PLAN.epsilon(3),
        "delta": 1e-3,
        "neighbours": "add_or_remove_one",
        "mechanism": "Gaussian noise on clipped sums of Poisson batches",
        "steps": 3,
        "account": [{"sampling_rate": 0.5, "noise_multiplier": 1.0, "steps": 3}],
        "accountant": "pld",
    }
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        told = file.metadata()
    assert told.keys() == {"format", "privacy"}
    assert json.loads(told["privacy"]) == claim
    assert os.listdir(tmp_path / "new") == ["model"]
    assert (folder / "model.safetensors").stat().st_mode & 0o444
    x = DATA[:3]
    module = Tied()
    load_model(module, folder / "model.safetensors", strict=False)
    assert_exact(module(x), fmodel(state.params, state.buffers, x), 0)


def test_no_byte_of_the_key_or_the_optimizer_is_in_a_release(tmp_path):
    state, _ = private()
    release(tmp_path / "a", state, PLAN)
    everything = b"".join(contents(tmp_path / "a").values())
    save(tmp_path / "state", state)
    secret = state.key.numpy().tobytes()
    assert secret in b"".join(contents(tmp_path / "state").values())
    moments = [each for each in vgrad.tree.tensors(state.optimizer) if each.numel() > 3]
    for each in (secret, *(m.numpy().tobytes() for m in moments)):
        assert each not in everything
    assert state.plan_digest.numpy().tobytes() not in everything
    for word in ("key", "loss", "digest", "dataset", "optimizer"):
        assert word.encode() not in contents(tmp_path / "a")["privacy.json"]
    # What differs between states of one release changes nothing in it.
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
    found = {
        b"".join(files.serialized("file", dict(order), metadata))
        for order in (
            tensors.items(),
            sorted(tensors.items()),
            reversed(tensors.items()),
        )
    }
    assert len(found) == 1
    content = found.pop()
    assert_exact(safetensors.torch.load(content), tensors, 0)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert list(header["__metadata__"].items()) == sorted(metadata.items())


def test_a_sealed_file_is_the_same_bytes_each_time(tmp_path):
    state, _ = private()
    for number in range(8):
        path = tmp_path / str(number)
        files.write_tensors(path, vgrad.tree.state_dict(state), {"kind": "state"})
    assert len({each for each in contents(tmp_path).values()}) == 1


def test_the_claim_counts_plans_before(tmp_path):
    state, _ = private(2)
    then = dataclasses.replace(PLAN, noise_multiplier=2.0).after(PLAN, 2)
    release(tmp_path / "begun", state, then)
    claim = json.loads((tmp_path / "begun" / "privacy.json").read_text())
    assert claim["epsilon"] == PLAN.epsilon(2)
    assert [each["steps"] for each in claim["account"]] == [2]
    fmodel, tx = private(0)[1], optim.adam(0.1)
    step = private_step(vgrad.sample_loss(fmodel, F.cross_entropy), tx, then)
    for rows in then.sampler(state):
        state, _ = step(state, DATA[rows], LABELS[rows])
    release(tmp_path / "ended", state, then)
    claim = json.loads((tmp_path / "ended" / "privacy.json").read_text())
    assert claim["epsilon"] == then.epsilon() > PLAN.epsilon(2)
    assert [(each["noise_multiplier"], each["steps"]) for each in claim["account"]] == [
        (1.0, 2),
        (2.0, 5),
    ]


def test_private_gradients_have_a_plan(tmp_path):
    module = Tied()
    module.o.bias.requires_grad_(False)
    run = PrivateGradients(
        module, F.cross_entropy, TensorDataset(DATA, LABELS), plan=PLAN
    )
    with pytest.raises(ValueError, match="got one that has taken none, of which"):
        release(tmp_path / "none", run)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad])
    for batch in run.loader:
        run.backward(*batch)
        optimizer.step()
    with pytest.raises(TypeError, match="expected no plan beside a PrivateGradients"):
        release(tmp_path / "none", run, PLAN)
    release(tmp_path / "model", run)
    held = load_file(tmp_path / "model" / "model.safetensors")
    expected = module.state_dict()
    del expected["b.weight"]
    assert_exact(held, dict(expected), 0)
    claim = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert (claim["steps"], claim["epsilon"]) == (2, run.epsilon())
    again = Tied()
    load_model(again, tmp_path / "model" / "model.safetensors")
    assert_exact(again(DATA), module(DATA), 0)


def refused(tmp_path, error, message, *given):
    with pytest.raises(error, match=message):
        release(tmp_path / "model", *given)
    assert not list(tmp_path.iterdir())


def test_what_is_no_private_run_is_refused(tmp_path):
    state, _ = private(1)
    quieter = dataclasses.replace(PLAN, noise_multiplier=2.0)
    silent = dataclasses.replace(PLAN, noise_multiplier=0.0)
    begun, _ = private(0)
    plain, _ = train_step(
        lambda params, buffers: params["a.weight"].sum(), optim.adam(0.1)
    )(begun)
    members = EnsembleState.create(optim.sgd(0.1), {"w": torch.zeros(2, 3)}, {})
    stacked = vgrad.tree.tree_map(lambda *each: torch.stack(each), state, state.fork())
    short = dataclasses.replace(PLAN, steps=1)
    for error, message, *given in [
        (TypeError, "expected the dp.Plan under which .* got a NoneType", state),
        (TypeError, "expected the dp.Plan under which .* got a float", state, 3.0),
        (TypeError, "the TrainState of a private run, .* EnsembleState", members, PLAN),
        (TypeError, "expected the TrainState of .* got a dict", state.params, PLAN),
        (TypeError, r"got several that are stacked, \(2,\)", stacked, PLAN),
        (ValueError, "got one that has spent under another", state, quieter),
        (ValueError, "has taken none, of which there is nothing", begun, PLAN),
        (ValueError, "has taken none, of which there is nothing", plain, PLAN),
        (ValueError, "at most the 1 steps of the plan", private(2)[0], short),
        (ValueError, "expected a plan of a finite eps", private(1, silent)[0], silent),
    ]:
        refused(tmp_path, error, message, *given)


def test_shards_are_refused_and_gathered(tmp_path):
    from vgrad import distributed

    state, _ = private(1)
    with distributed.alone("dp") as mesh:
        cut = state._replace(params=distributed.shard(state.params, mesh))
        refused(
            tmp_path, TypeError, "got a DTensor in 'a.weight'. Pass dist", cut, PLAN
        )
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
    for name in ("empty", "file", "link", "run"):
        before = sorted(tmp_path.rglob("*"))
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

    monkeypatch.setattr(files, "replace", failing)
    with pytest.raises(OSError, match="no space left"):
        release(tmp_path / "model", state, PLAN)
    assert calls == ["model.safetensors", "privacy.json"]
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "left").write_text("by a process that was killed")
    release(tmp_path / "model", state, PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(contents(tmp_path / "model")) == 2


def test_a_state_after_a_release_is_as_it_was(tmp_path):
    state, _ = private(1)
    before = copy.deepcopy(state)
    release(tmp_path / "model", state, PLAN)
    assert_exact(state, before, 0)
    assert torch.equal(state.key, secret_key(seed=1))
