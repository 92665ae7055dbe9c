"""What has to hold before a run goes on; nothing is written or cut until it does.

Anybody can write a state and seal it. It may neither name a file that is not one of the
run's, nor claim a progress that its tensors and figures do not have.
"""

from pathlib import Path

from vgrad import checks
from vgrad.cli import checkpoint, metrics
from vgrad.cli.descriptions import TABLE, check, whole
from vgrad.cli.files import Description
from vgrad.cli.members import PrivateMembers
from vgrad.cli.setup import Job, Pair

_SECTIONS = ("arguments", "lengths", "data", "plan", "model", "machine", "forms")


def check_said(before: Description) -> None:
    """Raise if a state lacks what every state says."""
    kinds = {"step": whole(0), **dict.fromkeys(_SECTIONS, TABLE)}
    check(checkpoint.STATE, before, kinds)


def refuse_differences(before: Description, now: Description) -> None:
    """Raise if something is not as it was when the run started."""
    for section, entries in now.items():
        for name, value in entries.items():
            recorded = before[section].get(name)
            if recorded != value:
                raise ValueError(
                    f"--resume: expected {name} in {section} to be {recorded!r}, as "
                    f"when the run was started, got {value!r}. The numbers would be "
                    f"others; start another run with --out."
                )


def refuse_progress(job: Job, folder: Path, states: Pair, before: Description) -> None:
    """Raise if the states, or the figures in the folder, are not those of the step."""
    path, step = folder / checkpoint.STATE, before["step"]
    taken = {
        int(one.step)
        for state in states
        if state
        for one in (state.members if isinstance(state, PrivateMembers) else [state])
    }
    if taken != {step} or step not in (0, *job.ends):
        raise ValueError(
            f"{path}: expected states at the end of an epoch, after the {step} steps "
            f"that it claims, got some after {sorted(taken)}."
        )
    names = metrics.names(job.trainers)
    lengths = before["lengths"]
    check(f"{path}, lengths", lengths, dict.fromkeys(names, whole(0)))
    if unknown := lengths.keys() - set(names):
        raise ValueError(
            f"{path}, lengths: expected {', '.join(names)}, got "
            f"{checks.listed(unknown)}, which no run writes to."
        )
    ends = [end for end in job.ends if end <= step]
    for name in names:
        if [line.step for line in metrics.read(folder / name, lengths[name])] != ends:
            raise ValueError(
                f"{folder / name}: expected one line for each of {len(ends)} epochs, "
                f"got others. The file was changed after it was written."
            )
