"""Every fold is what a plain loop of torch makes of it, killed and resumed or not."""

import itertools
import shutil
import stat
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import losses
from tests.oracle import assert_exact
from vgrad import optim
from vgrad.ensemble import fold_indices, member_seed
from vgrad.generators import secret_key, torch_seed
from vgrad.precision import DynamicLossScale, Policy
from vgrad.training import cross_validate

K, EPOCHS, N = 3, 3, 26  # 26 = 3 * 8 + 2: two samples are in no fold
LR, MOMENTUM, SEED = 0.05, 0.9, 4


def mlp(fold=0):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def dropping(fold):
    """Drops in evaluation mode too."""
    always = losses.Pick(lambda x: F.dropout(x, 0.5, training=True))
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), always, nn.Linear(6, 3)).double()


def normed(fold=0):
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()


ONE = mlp()


def samples(n=N):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, dtype=torch.float64, generator=source)
    return x, torch.randint(3, (n,), generator=source)


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def run(factory=mlp, data=None, criterion=F.cross_entropy, tx=None, **options):
    tx = tx or optim.sgd(LR, momentum=MOMENTUM)
    sizes = {"folds": K, "epochs": EPOCHS, "batch_size": 5, "seed": SEED}
    return cross_validate(
        factory, criterion, tx, *(data or samples()), **{**sizes, **options}
    )


@cache
def by_torch(factory):
    """The folds one by one in a plain loop: entries, training and validation losses."""
    x, y = samples()
    folds = []
    for fold, (train, held) in enumerate(
        zip(*fold_indices(K, len(x), seed=SEED), strict=True)
    ):
        torch.manual_seed(member_seed(SEED, fold))
        model = factory(fold)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        figures = []
        for epoch in range(EPOCHS):
            seed = torch_seed(secret_key(seed=SEED, member=fold), "epoch", epoch)
            source = torch.Generator().manual_seed(seed)
            total = 0.0
            order = torch.randperm(len(train), generator=source)
            for rows in train[order].split(5):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
            with torch.no_grad():
                output = model.eval()(x[held])
            model.train()
            loss, score = F.cross_entropy(output, y[held]), accuracy(output, y[held])
            figures.append([total / len(train), loss.item(), score.item()])
        entries = {name: value.detach() for name, value in model.state_dict().items()}
        folds.append((entries, torch.tensor(figures, dtype=torch.float64)))
    entries, figures = zip(*folds, strict=True)
    stacked = {name: torch.stack([e[name] for e in entries]) for name in entries[0]}
    return stacked, torch.stack(figures).unbind(2)


def undropped(fold):
    model = normed()
    model[4].p = 0.0
    return model


@pytest.mark.parametrize("at_once", [1, 2, None])
@pytest.mark.parametrize("factory", [mlp, undropped])
def test_folds_are_those_of_a_plain_loop(factory, at_once):
    before = torch.get_rng_state()
    result = run(factory, metric=accuracy, at_once=at_once)
    assert torch.equal(torch.get_rng_state(), before)
    entries, figures = by_torch(factory)
    assert_exact({**result.params, **result.buffers}, entries)
    assert_exact((result.train_losses, result.losses, result.scores), figures)
    assert_exact(result.skipped, torch.zeros(K, EPOCHS), 0.1)
    assert result.losses.dtype == torch.float64


class Killed(Exception):
    pass


def kill_at(number):
    """Make a callback that raises when it is called for the number-th time."""
    calls = itertools.count(1)

    def callback(epoch):
        if next(calls) == number:
            raise Killed

    return callback


RESUMED = {
    "batch norm": (normed, {"metric": accuracy}),
    "dropout, loss scale": (
        dropping,
        {"loss_scale": DynamicLossScale(2.0**4, period=3), "tx": optim.adam(0.01)},
    ),
}


@cache
def uninterrupted(name):
    factory, options = RESUMED[name]
    return run(factory, at_once=2, **options)


@pytest.mark.parametrize("killed", [2, 4])
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_goes_on_with_the_same_bits(name, killed, tmp_path):
    """Killed within the first two folds, or after the first epoch of the third."""
    factory, options = RESUMED[name]
    options = {**options, "at_once": 2, "folder": tmp_path / "new" / "folder"}
    whole, epochs = uninterrupted(name), []
    with pytest.raises(Killed):
        run(factory, callback=kill_at(killed), **options)
    before = torch.get_rng_state()
    assert_exact(run(factory, callback=epochs.append, **options), whole, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.epoch for each in epochs] == ([*range(EPOCHS)] * 2)[killed:]
    assert epochs[-1].folds == range(2, 3)
    assert torch.equal(epochs[-1].losses, whole.losses[2:, -1])
    assert_exact(run(factory, callback=kill_at(1), **options), whole, 0)
    paths = list(options["folder"].iterdir())
    assert {path.name for path in paths} == {"folds-0", "folds-2"}
    modes = [each.stat().st_mode for path in paths for each in path.iterdir()]
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(Killed):
        run(folder=folder, callback=kill_at(1))
    return folder


OTHER_CALLS = [
    ({"folds": 2}, "saved with folds = 2, got one with 3"),
    ({"epochs": 9}, "saved with epochs = 9, got one with 3"),
    ({"batch_size": 6}, "saved with batch_size = 6, got one with 5"),
    ({"seed": 5}, "saved with seed = 5, got one with 4"),
    ({"at_once": 1}, "saved with at_once = 1, got one with 3"),
    ({"strategy": "loop"}, "saved with strategy = 'loop', got one with 'auto'"),
    ({"metric": accuracy}, "saved with metric = True, got one with False"),
    ({"policy": "bfloat16"}, "saved with policy = 'params=bfloat16"),
    ({"data": samples(27)}, r"data = .*\(27, 4\).* got one with .*\(26, 4\)"),
    ({"data": (samples()[0].float(), samples()[1])}, "data = .'torch.float32"),
    ({"data": (samples()[0] + 1, samples()[1])}, "saved with sha256 of data = "),
    ({"factory": normed}, "expected the names of the model, got missing: "),
    ({"tx": optim.adam(0.01)}, "expected the names of the model, got missing: "),
    ({"loss_scale": DynamicLossScale()}, "names of the model, got missing: "),
]
NO_CALLS = [
    ({"folds": 1}, r"folds=1\): expected a whole number >= 2"),
    ({"folds": 27}, "at least one sample a fold, got 26"),
    ({"epochs": 0}, r"cross_validate\(epochs=0\): expected"),
    ({"batch_size": 0}, r"cross_validate\(batch_size=0\): expected"),
    ({"at_once": 0}, r"cross_validate\(at_once=0\): expected"),
    ({"data": (torch.ones(4, 4), torch.ones(3))}, "one batch size, got sizes"),
    ({"criterion": None, "metric": accuracy}, "expected a criterion, which takes"),
    ({"metric": lambda o, y: o}, r"one number for all samples, got shape \(8, 3\)"),
    ({"policy": "float8"}, r"Policy.parse\('float8'\): expected dtypes"),
    ({"factory": lambda k: ONE}, r"cross_validate\(factory\): expected a n"),
    ({"factory": lambda k: nn.Linear(4, 3 + k)}, "expected shape"),
    (
        {"factory": lambda k: nn.Linear(4, 3 + k).double(), "at_once": 1},
        r"cross_validate\(factory\): expected shape",
    ),
]


@pytest.mark.parametrize(
    ("resumes", "change", "message"),
    [(True, *row) for row in OTHER_CALLS] + [(False, *row) for row in NO_CALLS],
)
def test_a_call_that_does_not_fit_is_refused(resumes, change, message, begun):
    before = {path: path.read_bytes() for path in begun.glob("*/*")}
    with pytest.raises(ValueError, match=message):
        run(folder=begun if resumes else None, **change)
    assert {path: path.read_bytes() for path in begun.glob("*/*")} == before


def test_a_damaged_or_older_file_is_refused_and_a_missing_one_begins(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "new")
    (path,) = (tmp_path / "new").glob("*/pieces-*")
    content = path.read_bytes()[:-100]
    path.write_bytes(content)
    with pytest.raises(ValueError, match="got a damaged file"):
        run(folder=tmp_path / "new")
    assert path.read_bytes() == content
    (tmp_path / "folds-0").mkdir()
    assert_exact(run(folder=tmp_path), run(), 0)
    (tmp_path / "folds-0.safetensors").touch()
    with pytest.raises(ValueError, match="Finish a run with the version that began"):
        run(folder=tmp_path)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_policies_train_and_evaluate(policy):
    dtype, (x, _) = Policy.parse(policy).compute_dtype, samples()

    def share(output, target):
        assert output.dtype == torch.float32
        assert torch.equal(output, output.to(dtype).float())
        return accuracy(output, target)

    options = {"data": (x.float(), (x[:, 0] > 0).long()), "tx": optim.adam(0.03)}
    make = lambda fold: normed().float()  # noqa: E731
    result = run(make, policy=policy, metric=share, **options)
    exact = run(make, **options)
    assert_exact(result.losses, exact.losses, 0.1)
    same = result.train_losses == exact.train_losses
    assert same.all() if policy == "float32" else not same.any()
    assert all(value.dtype == torch.float32 for value in result.params.values())


def test_no_two_groups_draw_the_same():
    result = run(at_once=1, metric=lambda output, target: torch.rand(()))
    assert len(result.scores.unique()) == K * EPOCHS


@pytest.mark.parametrize("scale", [None, DynamicLossScale(2.0**4, period=3)])
def test_skipped_steps_are_counted(scale):
    """The batch with the sample that is not finite, in folds that are trained on it."""
    x, y = samples()
    _, held = fold_indices(K, len(x), seed=SEED)
    x[held[1, 0]] = torch.inf
    result = run(data=(x, y), loss_scale=scale)
    expected = torch.tensor([[1.0], [0.0], [1.0]]).expand(K, EPOCHS)
    assert torch.equal(result.skipped, expected.double())
    assert result.losses[[0, 2]].isfinite().all()


def test_models_that_return_their_loss_and_dictionaries():
    x, y = samples()

    def own(fold):
        return losses.Net(
            lambda self, inputs, labels: {
                "loss": F.cross_entropy(self.inner(inputs), labels)
            },
            inner=mlp(),
        )

    result = run(own, data=({"inputs": x, "labels": y},), criterion=None)
    assert_exact(result.losses, run().losses)
