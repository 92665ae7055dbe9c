"""Run experiments: `python -m bench.experiments NAME [NAME ...]`."""

import argparse
import importlib
import sys
from pathlib import Path

from bench.experiments.study import Place, Study, run

NAMES = (
    *("per-sample", "ensembles", "jmp", "mobilenet", "tensor-cores", "private"),
    "attribution",
)
"""Each is a module of this folder; the most telling first."""


def study(name: str) -> Study:
    """Return an experiment."""
    module = importlib.import_module(f"bench.experiments.{name.replace('-', '_')}")
    return module.STUDY


def main() -> None:
    """Read the arguments and run what they name."""
    parser = argparse.ArgumentParser(prog="python -m bench.experiments")
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"], metavar="NAME")
    parser.add_argument("--size", choices=["tiny", "small", "full"], default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    arguments = parser.parse_args()
    names = NAMES if "all" in arguments.names else arguments.names
    failed = []
    for name in names:
        place = Place(arguments.size, arguments.device, arguments.out, arguments.data)
        try:
            seen = run(name, study(name), place)
        except KeyboardInterrupt:
            print(f"{name}: interrupted; the same command goes on.", file=sys.stderr)
            sys.exit(130)
        except (AssertionError, ValueError, OSError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
        else:
            print(*(f"{name}: {line}" for line in seen), sep="\n")
    if failed:
        sys.exit(f"experiment: {', '.join(failed)} failed.")


if __name__ == "__main__":
    main()
