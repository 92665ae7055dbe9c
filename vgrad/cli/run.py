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
from collections.abc import Callable, Iterator
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
from vgrad.cli.checkpoint import FIGURES, Record, States
from vgrad.cli.evaluate import judge
from vgrad.cli.settings import Settings, folder_of
from vgrad.cli.setup import Job, Taken, Trainer
from vgrad.distributed import RankError, Ranks, replicated
from vgrad.dp.plan import check_spent
from vgrad.precision import NoOpLossScale

_PATIENCE = timedelta(seconds=45)
"""How long a rank waits for another one before it takes it for dead."""


def train(arguments: Namespace) -> None:
    """Start the run that the arguments describe, or go on with one."""
    with _launched() as mesh:
        if arguments.resume is None:
            settings = Settings.started(arguments)
            _begin(settings, folder_of("--out", arguments.out), mesh)
        else:
            _resume(folder_of("--resume", arguments.resume), arguments, mesh)


def _begin(settings: Settings, folder: Path, mesh: DeviceMesh | None) -> None:
    ranks = Ranks.of_all("train", mesh)
    with ExitStack() as locks:
        with ranks.together("train, its start"):
            _refuse_taken(folder)  # now, and not after the minutes a plan may take
            job = setup.prepare(settings, mesh)
        with ranks.together("train, its folder"):
            if ranks.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                files.sync_folder(folder.parent)
                locks.enter_context(files.locked(folder, "training"))
                _refuse_taken(folder)
        states = {run: trainer.start for run, trainer in job.trainers.items()}
        if mesh is not None:
            states = replicated(states, mesh)
        _run(job, folder, states, {FIGURES[run]: 0 for run in job.trainers}, ranks)


def _refuse_taken(folder: Path) -> None:
    names = (*checkpoint.FILES, *FIGURES.values(), *report.PICTURES, report.PAGE)
    for name in names:
        if os.path.lexists(folder / name):
            raise FileExistsError(
                f"--out {folder}: expected a folder without a run, got one with "
                f"{name}. Go on with --resume {folder}, or name another folder."
            )


def _resume(folder: Path, arguments: Namespace, mesh: DeviceMesh | None) -> None:
    ranks = Ranks.of_all("train", mesh)
    with ExitStack() as locks:
        with ranks.together("train, its state"):
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"--resume {folder}: expected the folder of a run, got none there."
                )
            if ranks.rank == 0:
                locks.enter_context(files.locked(folder, "training"))
        with ranks.together("train, its checks"):
            job, states, before = _checked(folder, arguments, mesh)
        lengths = before["lengths"]
        if before["step"] == job.ends[-1] and (folder / report.PAGE).exists():
            report.say(f"The run in {folder} is finished; nothing was changed.")
            return
        # Nothing is written or cut before all of it has been checked.
        if ranks.rank == 0:
            for name, length in lengths.items():
                checkpoint.cut(folder / name, length)
        _run(job, folder, states, lengths, ranks)


def _checked(
    folder: Path, arguments: Namespace, mesh: DeviceMesh | None
) -> tuple[Job, dict[str, Any], files.Description]:
    tensors, before = checkpoint.read_state(folder)
    settings = Settings.recorded(before["arguments"], arguments)
    job = setup.prepare(settings, mesh)
    checkpoint.check_same(before, job.description)
    starts = {run: trainer.start for run, trainer in job.trainers.items()}
    restored = checkpoint.restored(States(**starts), tensors)._asdict()
    states = {run: restored[run] for run in job.trainers}
    if job.plan:
        digest = states["private"].plan_digest
        check_spent(f"--resume {folder}", job.plan, digest, before["step"])
    for name, length in before["lengths"].items():
        checkpoint.read(folder / name, length)
    return job, states, before


def _run(
    job: Job,
    folder: Path,
    states: dict[str, Any],
    lengths: dict[str, int],
    ranks: Ranks,
) -> None:
    report.announce(job, ranks.size)
    models.warn_if_slow(job.settings.precision, job.settings.device)
    # After a kill the files that follow from the state may be one epoch behind it.
    if ranks.rank == 0:
        _save(job, folder, states, lengths)
    slower = next(iter(job.trainers))  # private SGD, which the bar follows
    with report.display(job.ends[-1], len(job.ends)) as (show_step, show_epoch):
        for number, end in enumerate(job.ends, start=1):
            if end <= int(states["plain"].step):
                continue
            results = {
                run: _epoch(
                    job, trainer, states[run], end, show_step if run == slower else None
                )
                for run, trainer in job.trainers.items()
            }
            states = {run: state for run, (state, _) in results.items()}
            records = {run: record for run, (_, record) in results.items()}
            with ranks.together("train, its files"):
                if ranks.rank == 0:
                    lengths = {
                        FIGURES[run]: checkpoint.append(folder / FIGURES[run], record)
                        for run, record in records.items()
                    }
                    _save(job, folder, states, lengths)
            show_epoch(number, records)
    with ranks.together("train, its pictures"):
        if ranks.rank == 0:
            figures = {
                run: checkpoint.read(folder / name, lengths[name])
                for run, name in FIGURES.items()
                if run in job.trainers
            }
            report.finish(folder, job, states, figures)


def _epoch(
    job: Job,
    trainer: Trainer,
    state: Any,
    end: int,
    show: Callable[[int], None] | None,
) -> tuple[Any, Record]:
    total, started = Taken(torch.zeros(()), 0, torch.zeros(())), time.perf_counter()
    while (step := int(state.step)) < end:
        state, sums = trainer.advance(state, job.data)
        total = total.plus(sums)
        if show is not None:
            show(step + 1)
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
    job: Job, folder: Path, states: dict[str, Any], lengths: dict[str, int]
) -> None:
    step = int(states["plain"].step)
    progress = {"step": step, "lengths": lengths}
    checkpoint.save_state(folder, States(**states), {**job.description, **progress})
    run = next(iter(job.trainers))
    claimed = not job.settings.reproducible_noise
    description = {
        "model": job.settings.model,
        "precision": job.settings.precision,
        "shape": job.data.shape._asdict(),
        "seed": job.settings.seed,
        "step": step,
        "epsilon": job.trainers[run].epsilon(step) if claimed else None,
        "delta": job.plan.delta if job.plan else None,
        "plan": asdict(job.plan) if job.plan else None,
    }
    if job.settings.members > 1:
        description["members"] = job.settings.members
    released = states[run]
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
