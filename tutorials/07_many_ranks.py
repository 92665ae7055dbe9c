"""Private training on four processes, whose parameters are those of one.

Each process computes on its own part of a batch. The clipped sums are added up once,
and the noise is a function of the state's key and step, so that all processes add the
same: neither the plan nor the result knows how many there are.

This script starts its processes itself. With torchrun, or another launcher, the
function `train` is the whole program:

    torchrun --nproc-per-node 4 program.py
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from vgrad.distributed import data_parallel, local_batches, replicated
from vgrad.dp import Plan, collate
from vgrad.training import TrainState, private_step

RANKS = 4
STEPS = 20


def train(size: int) -> TrainState:
    """Take private steps on this rank's part of every batch."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)

    # The plan speaks of whole batches: 180 samples on average, on all ranks together.
    plan = Plan.for_epsilon(
        3.0,
        dataset_size=len(dataset),
        sampling_rate=180 / len(dataset),
        max_norm=1.0,
        steps=STEPS,
        delta=1e-5,
    )
    tx = vgrad.optim.sgd(1.0)
    step = data_parallel(private_step(loss, tx, plan), mesh)

    # All ranks start from the first one's parameters, and from its secret key. A seed
    # makes this run comparable; without one the key comes from the operating system.
    state = replicated(TrainState.create(tx, params, buffers, seed=0), mesh)

    # Every rank draws the same batch from the key, and takes its own part of it.
    batches = local_batches(plan.sampler(state), mesh)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate(dataset))
    for x, y in loader:
        state, metrics = step(state, x, y)
    if mesh.get_rank() == 0:
        print(
            f"ranks: {size}, loss {metrics['loss']:.3f} of the last batch, "
            f"{metrics['samples']} samples; epsilon {plan.epsilon():.2f}"
        )
    return state


def run(rank: int, size: int, folder: str) -> None:
    """Be one of the processes: join the others, train, and keep what came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    store = distributed.FileStore(f"{folder}/store-{size}", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    state = train(size)
    vgrad.training.save_state(f"{folder}/{size}-{rank}.safetensors", state.params)
    distributed.destroy_process_group()


def main() -> None:
    """Train on one process and on four, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, RANKS):
            multiprocessing.spawn(run, args=(size, folder), nprocs=size)
        like = vgrad.make_functional_with_buffers(
            nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        )[1]

        def params(size: int, rank: int) -> dict[str, torch.Tensor]:
            path = Path(folder) / f"{size}-{rank}.safetensors"
            return vgrad.training.load_state(path, like)

        one, *ranks = params(1, 0), *(params(RANKS, rank) for rank in range(RANKS))
        for name, value in one.items():
            assert all(torch.equal(each[name], ranks[0][name]) for each in ranks)
            error = (ranks[0][name] - value).abs().max() / value.abs().max()
            print(f"{name}: {error:.1e} from one process")
            assert error < 1e-5


if __name__ == "__main__":
    main()
