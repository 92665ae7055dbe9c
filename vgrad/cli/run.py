"""The training run: private and plain SGD side by side, epoch after epoch.

After each epoch the figures are appended to the metrics, then both states are saved,
then the model is. A run can be killed at any moment, and goes on from the last state
with the numbers of a run that was not.

Noise never serves two different releases. Batches and noise of a step follow from the
key in the state, so the steps after the last state are repeated exactly. A run that
would differ in anything which changes these steps is refused, and the lines of the lost
steps are cut off the metrics.

A run that was extended has more epochs than it was started for, and the same noise. The
state says so before the first step beyond the old end.
"""

import contextlib
import fcntl
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from vgrad import files
from vgrad.cli import (
    checkpoint,
    metrics,
    models,
    report,
    setup,
)
from vgrad.cli.evaluate import judge
from vgrad.cli.metrics import FIGURES, Record
from vgrad.cli.settings import Settings, folder_of
from vgrad.cli.setup import Job, Pair, PrivateMembers, Trainer, World
from vgrad.distributed import RankError
from vgrad.dp.plan import check_spent
from vgrad.precision import NoOpLossScale

_PATIENCE = timedelta(seconds=45)
"""How long a rank waits for another one before it takes it for dead."""


def train(given: Namespace) -> None:
    """Start the run that the arguments describe, or go on with one.

    Raises:
        OSError, ValueError: an argument or file does not fit; nothing was overwritten.
    """
    if given.extend and not (given.resume and "epochs" in given):
        raise ValueError(
            "--extend: expected --resume DIR and --epochs N with it, the number of "
            "epochs that the longer run has in all."
        )
    with _ranks() as world:
        if given.resume is None:
            _begin(Settings.started(given), folder_of("--out", given.out), world)
        else:
            _resume(folder_of("--resume", given.resume), given, world)


def _begin(settings: Settings, folder: Path, world: World) -> None:
    with ExitStack() as held:
        with world.together("train, its start"):
            _refuse_taken(folder)  # now, and not after the minutes a plan may take
            job = setup.prepare(settings)
        with world.together("train, its folder"):
            if world.is_first:
                folder.mkdir(parents=True, exist_ok=True)
                files.sync_folder(folder.parent)
                held.enter_context(_alone(folder))
                _refuse_taken(folder)
        lengths = dict.fromkeys(metrics.names(job.trainers), 0)
        _run(job, folder, world.of_first(job.start), lengths, world)


def _refuse_taken(folder: Path) -> None:
    """Raise if a folder holds a file of a run, or anything by that name."""
    for name in (*checkpoint.FILES, *FIGURES, *report.PICTURES, report.PAGE):
        if os.path.lexists(folder / name):
            raise FileExistsError(
                f"--out {folder}: expected a folder without a run, got one with "
                f"{name}. Go on with --resume {folder}, or name another folder."
            )


def _resume(folder: Path, given: Namespace, world: World) -> None:
    with ExitStack() as held:
        with world.together("train, its state"):
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"--resume {folder}: expected the folder of a run, got none there."
                )
            if world.is_first:
                held.enter_context(_alone(folder))
        with world.together("train, its checks"):
            checked = _checked(folder, given)
        job, states, before = checked
        lengths = before["lengths"]
        if before["step"] == job.ends[-1] and (folder / report.PAGE).exists():
            report.say(f"The run in {folder} is finished; nothing was changed.")
            return
        # Nothing is written or cut before all of it has been checked.
        if world.is_first:
            for name, length in lengths.items():
                metrics.cut(folder / name, length)
        _run(job, folder, states, lengths, world)


def _checked(folder: Path, given: Namespace) -> tuple[Job, Pair, files.Description]:
    """Read the state of a run, and check all of it."""
    tensors, before = checkpoint.read_state(folder)
    checkpoint.check_said(before)
    settings = Settings.recorded(before["arguments"], given)
    checkpoint.check_members(tensors, settings.members)
    ends_at = [settings.epochs, *(before.get("extended") or [])]
    job = setup.prepare(settings, _extended(ends_at, given))
    description = job.description
    if job.plan:  # a run that is extended now has more steps
        steps = job.ends[ends_at[-1] - 1] * settings.members
        description = {**description, "plan": {**description["plan"], "steps": steps}}
    checkpoint.refuse_differences(before, description)
    states = checkpoint.restored(job.start, tensors)
    if job.plan is not None:
        for state in _each(states.private):
            check_spent(
                f"--resume {folder}", job.plan, state.plan_digest, int(state.step)
            )
    checkpoint.refuse_progress(
        folder,
        before,
        taken=_steps_taken(states),
        ends=job.ends,
        names=metrics.names(job.trainers),
    )
    return job, states, before


def _extended(epochs: list[int], given: Namespace) -> list[int]:
    """Return the epochs of each extension; `epochs` begins with the start's."""
    if epochs != sorted(set(epochs)):
        raise ValueError(
            f"{checkpoint.STATE}: expected more epochs after each extension, got "
            f"{epochs}. The file was changed after it was written."
        )
    extended = epochs[1:]
    # The same command once more goes on with its extension.
    if not given.extend or extended[-1:] == [given.epochs]:
        return extended
    if given.epochs <= epochs[-1]:
        raise ValueError(
            f"--extend --epochs {given.epochs}: expected more than the {epochs[-1]} "
            f"epochs that the run has in all, got no more. Name their new number, or "
            f"leave both out to go on with the run."
        )
    return [*extended, given.epochs]


def _steps_taken(states: Pair) -> set[int]:
    """Return how many steps each state has taken, each member of an ensemble's too."""
    return {int(one.step) for state in states if state for one in _each(state)}


def _each(state: Any) -> Sequence[Any]:
    """Return the states of members that take private steps, or the one there is."""
    return state.members if isinstance(state, PrivateMembers) else [state]


def _run(
    job: Job, folder: Path, states: Pair, lengths: dict[str, int], world: World
) -> None:
    """Train from the states given to the end, and draw the curves."""
    _announce(job, world)
    models.warn_if_slow(job.settings.precision, job.settings.device)
    # After a kill the files that follow from the state may be one epoch behind it.
    if world.is_first:
        _save(job, folder, states, lengths)
        # Of a run that is extended: the model is about to spend more than it says.
        (folder / report.PAGE).unlink(missing_ok=True)
    with report.display(job.ends[-1], len(job.ends)) as shown:
        for number, end in enumerate(job.ends, start=1):
            if end <= int(states.plain.step):
                continue
            # The bar follows private SGD, the slower of the two.
            slower = job.trainers.private or job.trainers.plain
            results = [
                _epoch(job, each, state, end, shown.step if each is slower else None)
                if each
                else ((), None)
                for each, state in zip(job.trainers, states, strict=True)
            ]
            states, figures = (Pair(*each) for each in zip(*results, strict=True))
            with world.together("train, its files"):
                if world.is_first:
                    lengths = {
                        name: metrics.append(folder / name, record)
                        for name, record in zip(FIGURES, figures, strict=True)
                        if record
                    }
                    _save(job, folder, states, lengths)
            shown.epoch(number, *figures)
    with world.together("train, its pictures"):
        if world.is_first:
            _finish(job, folder, states, lengths)


def _finish(job: Job, folder: Path, states: Pair, lengths: dict[str, int]) -> None:
    private, plain = [
        metrics.read(folder / name, lengths[name]) if trainer else []
        for name, trainer in zip(FIGURES, job.trainers, strict=True)
    ]
    figures = report.draw(job, states, private, plain)
    images = {
        name: report.write_picture(figure, folder / name)
        for name, figure in figures.items()
    }
    report.show_table(private, plain)
    # The last of all files: its presence says that the run is finished.
    report.write_page(folder, job, private, plain, images)
    report.say(report.release(job, folder))
    report.say(f"The run in pictures, not for release: {folder / report.PAGE}")


def _epoch(
    job: Job,
    trainer: Trainer,
    state: Any,
    end: int,
    show: Callable[[int], None] | None,
) -> tuple[Any, Record]:
    """Train until `end` steps have been taken, and judge the model."""
    total, samples, started = torch.zeros(()), 0, time.perf_counter()
    skipped = torch.zeros(())
    while int(state.step) < end:
        state, taken = trainer.advance(state, job.data)
        total, skipped = total + taken.loss, skipped + taken.skipped
        samples += taken.samples
        if show is not None:
            show(int(state.step))
    loss = total.item() / max(1, samples)
    seconds = time.perf_counter() - started  # after item(), which waits for a GPU
    held = job.data.x_test, job.data.y_test
    share, each = judge(lambda x: trainer.scores(state, x), *held)
    scaled = not isinstance(state.loss_scale, NoOpLossScale)
    return state, Record(
        step=end,
        loss=loss if samples and math.isfinite(loss) else None,
        test_accuracy=share,
        epsilon=trainer.epsilon(end),
        samples_per_second=samples / seconds,
        loss_scale=float(state.loss_scale.loss_scale.min()) if scaled else None,
        skipped=int(skipped) if scaled else None,
        member_accuracies=each,
    )


def _save(job: Job, folder: Path, states: Pair, lengths: dict[str, int]) -> None:
    """Save the states and then the model, which may follow from no other state."""
    step = int(states.plain.step)
    progress = {"step": step, "lengths": lengths, "extended": list(job.extended)}
    checkpoint.save_state(folder, states, {**job.description, **progress})
    which = 0 if job.settings.private else 1
    released, spent = states[which], job.trainers[which].epsilon(step)
    description = {
        "model": job.settings.model,
        "precision": job.settings.precision,
        "shape": job.data.shape._asdict(),
        "seed": job.settings.seed,
        "step": step,
        "epsilon": None if job.settings.reproducible_noise else spent,
        "delta": job.plan.delta if job.plan else None,
        "plan": asdict(job.plan) if job.plan else None,
    }
    write = checkpoint.save_model
    if job.settings.members > 1:
        write = checkpoint.save_members
        description["members"] = job.settings.members
    write(folder, released.params, released.buffers, description)


def _announce(job: Job, world: World) -> None:
    settings, plan = job.settings, job.plan
    sizes = f"{len(job.data.y_train)} training and {len(job.data.y_test)} held-out"
    count = settings.members
    params = sum(value.numel() for value in job.start.plain.params.values())
    model = f"{settings.model}: {params // count} parameters"
    steps = f"{job.ends[-1]} steps"
    if count > 1:
        model += f", {count} members"
        steps += " of each member"
    if world.size > 1:
        steps += f" on {world.size} ranks"
    steps += f" at learning rate {settings.lr:g}, "
    noise = "without privacy."
    if plan:
        noise = (
            f"sampling rate {plan.sampling_rate:.4g} and noise multiplier "
            f"{plan.noise_multiplier:.4g}. In brackets: without privacy."
        )
    report.say(f"{settings.data}: {sizes} samples. {model}. {steps}{noise}")
    if plan and count > 1:
        report.say(
            f"All members share the budget: {plan.steps} steps on the same data."
        )
    for line in report.extensions(job):
        report.say(line)
    if settings.reproducible_noise:
        report.say(report.NO_CLAIM)
    if plan:
        report.say(
            "The figures of each epoch are computed from the private data without "
            "noise: they are not for release."
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a folder; a kill releases it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{folder}: expected a folder in which no other process is training."
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ranks() -> Iterator[World]:
    """Join the ranks that a launcher has started, if one has.

    Raises:
        OSError: another rank has failed, or is gone.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and not distributed.is_initialized():
        with _joined():
            yield World()
        return
    yield World()


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Make the process group of a run, in which the first rank alone prints."""
    backend, first = "gloo", int(os.environ["RANK"]) == 0
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend, timeout=_PATIENCE)
    with open(os.devnull, "w") as nowhere:
        shown = contextlib.redirect_stdout(sys.stdout if first else nowhere)
        try:
            with shown:
                yield
        except RankError as error:
            raise OSError(f"rank {os.environ['RANK']}: {error}") from error
        except (distributed.DistError, RuntimeError) as error:
            raise _lost(error) from error
        finally:
            distributed.destroy_process_group()  # a group left at exit may abort


def _lost(error: Exception) -> Exception:
    """Return an error about a lost rank, or the error itself if it is another."""
    text = str(error)
    if "gloo" not in text and not isinstance(error, distributed.DistError):
        return error
    return OSError(
        f"rank {os.environ['RANK']}: expected an answer of the other ranks within "
        f"{_PATIENCE.seconds} seconds, got: {text.partition(chr(10))[0]}. What was "
        f"saved is good, and --resume goes on with any number of ranks."
    )
