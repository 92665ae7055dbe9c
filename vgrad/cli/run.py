"""The training run: private and plain SGD side by side, epoch after epoch.

Noise never serves two releases: batches and noise of a step follow from the key in the
state, a killed run repeats the steps after its last state exactly, and one that would
differ in anything that changes them is refused.
"""

import contextlib
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vgrad import files
from vgrad.cli import checkpoint, models, report, setup
from vgrad.cli.checkpoint import Record, States
from vgrad.cli.evaluate import judge
from vgrad.cli.settings import Settings, folder_of
from vgrad.cli.setup import Job, Taken, Trainer
from vgrad.distributed import RankError, Ranks, replicated
from vgrad.dp.plan import check_spent
from vgrad.precision import NoOpLossScale
from vgrad.training import saved

_PATIENCE = timedelta(seconds=45)
"""How long a rank waits for another one before it takes it for dead."""


def train(arguments: Namespace) -> None:
    """Start the run that the arguments describe, or go on with one."""
    with _launched() as mesh, ExitStack() as locks:
        ranks = Ranks.of_all("train", mesh)

        def lock(folder: Path) -> None:
            if ranks.rank == 0:
                locks.enter_context(files.locked(folder, "training"))

        if arguments.resume is None:
            folder = folder_of("--out", arguments.out)
            with ranks.together("train, its start"):
                _refuse_taken(folder)  # now, and not after the minutes a plan may take
                job = setup.prepare(Settings.started(arguments), mesh)
            with ranks.together("train, its folder"):
                if ranks.rank == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    files.sync_folder(folder.parent)
                lock(folder)
                _refuse_taken(folder)
            states, figures = job.starts(), {run: [] for run in job.trainers}
            if mesh is not None:
                states = replicated(states, mesh)
        else:
            folder = folder_of("--resume", arguments.resume)
            with ranks.together("train, its lock"):
                if not folder.is_dir():
                    raise FileNotFoundError(
                        f"--resume {folder}: expected the folder of a run, got none."
                    )
                lock(folder)
            with ranks.together("train, its state"):
                job, states, figures = _resumed(folder, arguments, mesh)
            done = int(states.plain.step) == job.ends[-1]
            if done and (folder / report.CURVES).exists():
                report.say(f"The run in {folder} is finished; nothing was changed.")
                return
        _run(job, folder, states, figures, ranks)


def _refuse_taken(folder: Path) -> None:
    for name in (*checkpoint.FILES, report.CURVES):
        if os.path.lexists(folder / name):
            raise FileExistsError(
                f"--out {folder}: expected a folder without a run, got one with "
                f"{name}. Go on with --resume {folder}, or name another folder."
            )


def _resumed(
    folder: Path, arguments: Namespace, mesh: DeviceMesh | None
) -> tuple[Job, States, dict[str, list[Record]]]:
    before = saved.read_meta(folder / checkpoint.STATE).settings
    settings = Settings.recorded(before["arguments"], arguments)
    job = setup.prepare(settings, mesh)
    states, figures = checkpoint.load_states(folder, job.starts(), job.description)
    if job.plan:
        step = int(states.private.step)
        check_spent(f"--resume {folder}", job.plan, states.private.plan_digest, step)
    return job, states, figures


def _run(
    job: Job,
    folder: Path,
    states: States,
    figures: dict[str, list[Record]],
    ranks: Ranks,
) -> None:
    report.announce(job, ranks.size)
    models.warn_if_slow(job.settings.precision, job.settings.device)
    # After a kill the files that follow from the state may be one epoch behind it.
    if ranks.rank == 0:
        _save(job, folder, states, figures)
    for number, end in enumerate(job.ends, start=1):
        if end <= int(states.plain.step):
            continue
        for run, trainer in job.trainers.items():
            state, record = _epoch(job, trainer, getattr(states, run), end)
            states = states._replace(**{run: state})
            figures[run].append(record)
        with ranks.together("train, its files"):
            if ranks.rank == 0:
                _save(job, folder, states, figures)
        report.show_epoch(f"{number}/{len(job.ends)}", figures)
    with ranks.together("train, its picture"):
        if ranks.rank == 0:
            report.finish(folder, job, figures)


def _epoch(job: Job, trainer: Trainer, state: Any, end: int) -> tuple[Any, Record]:
    total, started = Taken(torch.zeros(()), 0, torch.zeros(())), time.perf_counter()
    while int(state.step) < end:
        state, sums = trainer.advance(state, job.data)
        total = total.plus(sums)
    samples = total.samples
    loss = total.loss.item() / max(1, samples)
    seconds = time.perf_counter() - started  # after item(), which waits for a GPU
    share, members = judge(
        lambda images: job.scores(state.params, state.buffers, images),
        job.data.x_test,
        job.data.y_test,
    )
    loss_scale = state.loss_scale
    scaled = not isinstance(loss_scale, NoOpLossScale)
    return state, Record(
        step=end,
        loss=loss if samples and math.isfinite(loss) else None,
        test_accuracy=share,
        epsilon=trainer.epsilon(end),
        samples_per_second=samples / seconds,
        loss_scale=float(loss_scale.loss_scale.min()) if scaled else None,
        skipped=int(total.skipped) if scaled else None,
        member_accuracies=members,
    )


def _save(
    job: Job, folder: Path, states: States, figures: dict[str, list[Record]]
) -> None:
    checkpoint.save(folder, states, figures, job.description)
    run = next(iter(job.trainers))
    released, step = getattr(states, run), int(states.plain.step)
    claimed = not job.settings.reproducible_noise
    description = {
        "model": job.settings.model,
        "members": job.settings.members,
        "precision": job.settings.precision,
        "shape": job.data.shape._asdict(),
        "seed": job.settings.seed,
        "step": step,
        "epsilon": job.trainers[run].epsilon(step) if claimed else None,
        "plan": asdict(job.plan) if job.plan else None,
    }
    checkpoint.save_model(folder, released.params, released.buffers, description)


@contextmanager
def _launched() -> Iterator[DeviceMesh | None]:
    # The ranks that torchrun has started, of which the first alone prints.
    if distributed.is_available() and distributed.is_initialized():
        yield _mesh()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    rank, backend = os.environ["RANK"], "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend, timeout=_PATIENCE)
    with open(os.devnull, "w") as nowhere:
        try:
            with contextlib.redirect_stdout(sys.stdout if rank == "0" else nowhere):
                yield _mesh()
        except RankError as error:
            raise OSError(f"rank {rank}: {error}") from error
        except (distributed.DistError, RuntimeError) as error:
            text = str(error)
            if "gloo" not in text and not isinstance(error, distributed.DistError):
                raise
            raise OSError(
                f"rank {rank}: expected an answer of the other ranks within "
                f"{_PATIENCE.seconds} seconds, got: {text.partition(chr(10))[0]}. What "
                f"was saved is good, and --resume goes on with any number of ranks."
            ) from error
        finally:
            distributed.destroy_process_group()  # a group left at exit may abort


def _mesh() -> DeviceMesh:
    size = distributed.get_world_size()
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
