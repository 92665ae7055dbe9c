"""Private training on four processes, with the parameters of a run on one.

Each process computes on its own part of a batch. The clipped sums are added up once,
and the noise is a function of the state's key and step, so that all processes add the
same: neither the plan nor the result depends on their number.

This script starts its processes itself. With torchrun, or another launcher, a program
makes plan, data and mesh and calls the function `train`:

    torchrun --nproc-per-node 4 program.py
"""

import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vgrad
from vgrad.distributed import (
    data_parallel,
    local_batches,
    replicated,
    single_process_mesh,
)
from vgrad.dp import Plan, collate
from vgrad.training import TrainState, private_step

SEED, RANKS, STEPS = 0, 4, 20


def train(mesh: DeviceMesh, data: TensorDataset, plan: Plan) -> vgrad.typing.Params:
    """Take private steps on this rank's part of every batch. -> params and losses."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    tx = vgrad.optim.sgd(1.0)
    step = data_parallel(private_step(loss, tx, plan), mesh)

    # All ranks start from the first one's parameters, and from its secret key. A seed
    # makes this run comparable; without one the key comes from the operating system.
    state = replicated(TrainState.create(tx, params, buffers, seed=SEED), mesh)

    # Every rank draws the same batch from the key, and takes its own part of it.
    batches = local_batches(plan.sampler(state), mesh)
    losses = []
    for x, y in DataLoader(data, batch_sampler=batches, collate_fn=collate(data)):
        state, metrics = step(state, x, y)
        losses.append(metrics["loss"])
    return {**state.params, "losses": torch.stack(losses)}


def run(rank: int, folder: str, data: TensorDataset, plan: Plan) -> None:
    """Be one of the processes: join the others, train, and keep what came of it."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    state = train(mesh, data, plan)
    vgrad.training.save(f"{folder}/{rank}", state)
    distributed.destroy_process_group()


def main() -> None:
    """Train on one process and on four, compare, and draw."""
    # What only this process needs is imported here: the others read this file, too.
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))

    # The plan speaks of whole batches: 180 samples on average, on all ranks together.
    plan = Plan.for_epsilon(
        3.0,
        dataset_size=len(data),
        sampling_rate=180 / len(data),
        max_norm=1.0,
        steps=STEPS,
        delta=1e-5,
    )
    with single_process_mesh("dp") as mesh:
        one = train(mesh, data, plan)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder, data, plan), nprocs=RANKS)
        folders = [Path(folder) / f"{rank}" for rank in range(RANKS)]
        ranks = [vgrad.training.load(path, one) for path in folders]

    for name, value in one.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
        error = (ranks[0][name] - value).abs().max() / value.abs().max()
        print(f"{name:8}: {RANKS} processes differ from one by {error:.1e}")
        assert error < 1e-5

    plt.style.use("tableau-colorblind10")  # colours that all readers can tell apart
    _, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(one["losses"], "C0-", label="one process")
    axes.plot(ranks[0]["losses"], "C1o", fillstyle="none", label=f"{RANKS} processes")
    axes.set(xticks=range(0, STEPS, 5), xlabel="step", ylabel="mean loss of the batch")
    axes.set_title(
        f"Private training on {len(data)} digits, one hidden layer,\n"
        f"epsilon 3 at delta 1e-5, seed {SEED}"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    plt.show()


if __name__ == "__main__":
    main()
