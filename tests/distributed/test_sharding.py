"""Parameters cut among ranks, optimizers on them, and the memory that a rank needs."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import vgrad
from tests import oracle
from tests.distributed.nets import Language
from tests.distributed.processes import Processes, mesh_of
from tests.losses import Peak
from vgrad import optim
from vgrad.distributed import RankError, data_parallel, gather, shard
from vgrad.tree import tensors


def sorts():
    """All sorts: even, uneven, fewer rows than ranks, none, no dimensions."""
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 3),
        "uneven": torch.randn(5, 2, 2, dtype=torch.float64),
        "short": torch.randn(1, dtype=torch.bfloat16),
        "transposed": torch.randn(3, 4).t(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


def _there_and_back(size):
    mesh, plain = mesh_of(size)[0], sorts()
    parts = shard(plain, mesh)
    held = sum(each.to_local().numel() for each in parts.values())
    for name, part in parts.items():
        assert part.shape == plain[name].shape
        assert torch.equal(part.full_tensor(), plain[name])
    back = gather(parts, mesh)
    oracle.assert_exact(back, plain, 0)
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "dp"))
    oracle.assert_exact(gather(shard(plain, two), mesh), plain, 0)
    return held


def test_tensors_of_all_sorts_are_cut_and_put_together(some):
    held = some.run(_there_and_back, some.size)
    cut = sum(each.numel() for each in sorts().values()) - 1
    assert sum(held) == cut + some.size


def _refused(size):
    mesh, plain = mesh_of(size)[0], sorts()
    with pytest.raises(RankError, match="same tensors on all ranks"):
        shard({"w": torch.full((2,), float(mesh.get_rank()))}, mesh)
    with pytest.raises(ValueError, match="names of the mesh's axes"):
        shard(plain, mesh, data="tp")
    with pytest.raises(TypeError, match="ordinary tensors, got a DTensor in 'even'"):
        shard(shard(plain, mesh), mesh)
    norms = vgrad.per_sample_norm(lambda params, buffers, x: x.sum())
    norms, x = data_parallel(norms, mesh), torch.ones(2)
    columns = shard(plain, mesh)["even"].redistribute(placements=[Shard(1)])
    with pytest.raises(ValueError, match=r"cut along their first .* got 'even'"):
        norms({"even": columns}, {}, x)
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "dp"))
    other = DTensor.from_local(plain["even"], two, [Replicate(), Replicate()])
    params = {"a": shard(plain, mesh)["even"], "b": other}
    with pytest.raises(ValueError, match="one mesh with one axis, got 'b'"):
        norms(params, {}, x)
    mixed = {"even": plain["even"], "short": shard(plain, mesh)["short"]}
    with pytest.raises(TypeError, match="expected a DTensor in 'even', got a Tensor"):
        norms(mixed, {}, x)
    assert gather(plain, mesh) == plain


def test_what_is_cut_in_another_way_is_refused(ranks):
    ranks(2).run(_refused, 2)


def _fully_sharded(size):
    mesh, _ = mesh_of(size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    _, plain, _ = vgrad.make_functional_with_buffers(model)
    plain = {name: value.detach().clone() for name, value in plain.items()}
    own = shard(plain, mesh)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    assert theirs.keys() == own.keys() == model.state_dict().keys()
    oracle.assert_exact(gather(theirs, mesh), plain, 0)
    for name, value in own.items():
        assert torch.equal(value.to_local(), theirs[name].to_local())
    model.load_state_dict({name: 2 * value for name, value in own.items()})
    oracle.assert_exact(
        gather(dict(model.named_parameters()), mesh),
        {name: 2 * value for name, value in plain.items()},
        0,
    )


def test_parameters_come_from_fully_sharded_modules_and_go_back(some):
    some.run(_fully_sharded, some.size)


OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "asgd": lambda: optim.asgd(0.1),
    "adamw": lambda: optim.adamw(lambda step: 0.1 / (1 + step), amsgrad=True),
    "adadelta": lambda: optim.adadelta(0.1),
    "adagrad": lambda: optim.adagrad(0.1),
    "rmsprop": lambda: optim.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": lambda: optim.rprop(0.1),
    "lion": lambda: optim.lion(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "lars": lambda: optim.lars(0.1),
    "adafactor": lambda: optim.adafactor(0.1),
    "adamax": lambda: optim.adamax(0.1),
    "nadam": lambda: optim.nadam(0.1),
    "radam": lambda: optim.radam(0.1),
    "schedule_free": lambda: optim.schedule_free_adamw(0.1),
    "lookahead": lambda: optim.lookahead(optim.sgd(0.1)),
    "multi_steps": lambda: optim.multi_steps(optim.adam(0.1), 2),
    "clipped": lambda: optim.chain(
        optim.zero_nans(),
        optim.clip_by_value(0.9),
        optim.adaptive_grad_clip(0.05),
        optim.centralize(),
        optim.clip_by_block_rms(0.5),
        optim.clip_by_global_norm(0.01),
        optim.sgd(0.1),
        optim.ema_parameters(0.9),
    ),
    "adaptive": lambda: optim.chain(optim.adaptive_grad_clip(0.05), optim.sgd(0.1)),
    "central": lambda: optim.chain(optim.centralize(), optim.sgd(0.1)),
    "noisy": lambda: optim.chain(optim.add_noise(0.1, 0.55, seed=3), optim.adam(0.1)),
    "adam_bc": lambda: optim.adam_bc(0.1, deviation=0.5),
    "scaled": lambda: optim.chain(
        optim.zero_nans(), optim.scale_then_privatize(optim.adam(0.1))
    ),
    "injected": lambda: optim.inject_hyperparams(optim.adafactor, lr=0.1),
    "muon": lambda: optim.partition(
        {
            "matri*": optim.muon(0.1),
            "*": optim.apply_if_finite(optim.adam(0.1), max_consecutive_errors=1),
        }
    ),
}


def _gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    grads = {n: torch.randn(p.shape, generator=generator) for n, p in params.items()}
    grads["vector"][0] = torch.nan if step == 1 else 0.0
    return grads


def _whole(tree):
    found = [t for t in tensors(tree) if isinstance(t, DTensor)]
    placed = {t.placements for t in found}
    assert placed <= {(Shard(0),), (Replicate(),)}, placed
    leaves = tensors(tree)
    named = {str(number): each for number, each in enumerate(leaves)}
    return gather(named, found[0].device_mesh) if found else named


def _trained(size, name):
    mesh, _ = mesh_of(size)
    torch.manual_seed(0)
    whole = {
        "matrix": torch.randn(5, 4),
        "matrix of one row": torch.randn(1, 6),
        "matrix of none": torch.randn(0, 3),
        "images": torch.randn(8, 3, 2, 2),
        "image": torch.randn(1, 3, 2, 2),
        "vector": torch.randn(3),
        "one": torch.randn(1),
        "scale": torch.tensor(0.7),
    }
    parts = shard(whole, mesh)
    places = {each: part.placements for each, part in parts.items()}
    tx = OPTIMIZERS[name]()
    state, state_of_parts = tx.init(whole), tx.init(parts)
    for step in range(3):
        grads = _gradients(whole, step)
        with torch.no_grad():
            donate = step == 2
            whole, state = optim.step(tx, grads, state, whole, donate=donate)
            grads = shard(grads, mesh)
            parts, state_of_parts = optim.step(
                tx, grads, state_of_parts, parts, donate=donate
            )
        assert {each: part.placements for each, part in parts.items()} == places
    oracle.assert_exact(gather(parts, mesh), whole, 1e-6)
    found = _whole(state_of_parts)
    exact = {str(number): each for number, each in enumerate(tensors(state))}
    oracle.assert_exact(found, exact, 1e-6)


def _noised(size, dtype):
    """Return what noise adds to sharded gradients, and to whole ones; in two steps."""
    mesh, _ = mesh_of(size)
    shapes = {"a": (5, 4), "row": (1, 6), "zero": (0, 3), "one": (3,), "scale": ()}
    whole = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    parts, tx = shard(whole, mesh), optim.add_noise(0.1, 0.55, seed=3)
    state, own = tx.init(whole), tx.init(parts)
    for _ in range(2):
        expected, state = tx.update(whole, state)
        found, own = tx.update(parts, own)
    assert all(found[name].placements == parts[name].placements for name in parts)
    found = gather(found, mesh)
    oracle.assert_exact(found, expected, 0)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_same_bits_on_any_number_of_ranks(ranks, dtype):
    """Tensors that come along, and the number of ranks, change none."""
    first, *others = (
        found for size in (2, 4) for found in ranks(size).run(_noised, size, dtype)
    )
    for found in others:
        oracle.assert_exact(found, first, 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_steps_of_one_process(ranks, name):
    ranks(4).run(_trained, 4, name)


def next_tokens(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _bytes(size, sizes, passes):
    mesh, _ = mesh_of(size)
    torch.manual_seed(0)
    fmodel, params, _ = vgrad.make_functional_with_buffers(Language(*sizes, heads=4))
    loss = vgrad.sample_loss(fmodel, next_tokens)
    tokens = torch.randint(sizes[0], (1, sizes[-1]))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded", passes=passes)
    clipped = data_parallel(clipped, mesh)
    one = 4 * sum(value.nbytes for value in params.values())  # with sums and moments
    tx = optim.adamw(1e-3)
    params = shard({name: value.detach() for name, value in params.items()}, mesh)
    with Peak() as counted, torch.no_grad():
        counted.count([value.to_local() for value in params.values()])
        state = tx.init(params)
        for _ in range(2):
            grads = clipped(params, {}, tokens, tokens)
            params, state = optim.step(tx, grads.grads, state, params, donate=True)
        assert all(isinstance(value, DTensor) for value in params.values())
        counted.count(torch.zeros(()))
    return counted.now / one, counted.most / one


def _check(processes, sizes):
    for passes in (1, 2):
        for rest, peak in processes.run(_bytes, 4, sizes, passes):
            assert rest <= 0.26
            assert peak <= 0.42


@pytest.mark.more
def test_memory_is_that_of_the_parts_and_of_one_parameter(ranks):
    _check(ranks(4), (2043, 128, 3, 4))


@pytest.mark.large
def test_so_it_is_for_gpt2_small():
    processes = Processes(4, timeout=600)
    try:
        _check(processes, (50257, 768, 12, 16))
    finally:
        processes.stop()
