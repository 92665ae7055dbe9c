"""The command `audit`: how much the private step of a run spends, at the least."""

import sys
from argparse import Namespace

from vgrad.cli import checkpoint, report, setup
from vgrad.cli.models import Shape
from vgrad.dp.plan import Plan

PICTURE = "audit.png"


def audit(arguments: Namespace) -> None:
    """Audit the step of a run; exit with status 1 if it exceeds its claim."""
    folder, settings, before = checkpoint.described("audit", arguments)
    if not before["plan"]:
        raise ValueError(
            f"audit {folder}: expected a run with privacy, got one without."
        )
    plan, shape = Plan(**before["plan"]), Shape(**before["shape"])
    step, state = setup.audited(settings, shape, plan, before["chunk_size"])
    entries = sum(value.numel() for value in state.params.values())
    counts = {"canaries": arguments.canaries, "significance": arguments.significance}
    result = plan.audit(step, state, **counts)
    print(f"{settings.model}: {entries} parameters, two steps of the plan\n\n{result}")
    report.write_picture(result.plot(), folder / PICTURE)
    report.say(f"Saved: {folder / PICTURE}")
    if result.exceeded:
        sys.exit(1)
