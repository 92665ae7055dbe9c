"""What a private step costs on N ranks: a model of it beside what was measured.

`python -m bench.planning FILE`, with what `test_distributed.py` has left in the file.
The model has three numbers of a machine, taken from one rank and from two:

    step(N) = compute / min(N, cores) + noise * max(1, N / cores) + sent(N) / speed
    sent(N) = 2 (N - 1) / N * bytes of the sums

`compute` is a step of one rank with one thread without its noise, which each rank adds
to all of the sum; `speed` is the reduction's on two ranks. On machines of their
own, ranks do not share cores: there `cores` is their number, and `speed` the
network's.
"""

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def predicted(rows: dict[int, Row], ranks: int, cores: int) -> float:
    """Return the seconds of a step on so many ranks."""
    one, two = rows[1]["seconds_of_parts"], rows[2]["seconds_of_parts"]
    size = rows[1]["parameter_bytes"]
    speed = sent(2, size) / two["reduction"]
    compute = (one["step"] - one["noise"]) / min(ranks, cores)
    noise = one["noise"] * max(1, ranks / cores)
    return compute + noise + sent(ranks, size) / speed


def sent(ranks: int, size: int) -> float:
    """Return the bytes that a rank sends along a ring for sums of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def markdown(rows: list[Row], cores: int) -> str:
    """Return a table of all models and numbers of ranks."""
    text = [
        "| model | ranks | step | predicted | throughput | sent / ring |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted({row["setting"] for row in rows}):
        by_ranks = {row["ranks"]: row for row in rows if row["setting"] == name}
        for ranks, row in sorted(by_ranks.items()):
            ring = row["ring_bytes"]
            more = f"{row['sent_bytes'] / ring:.2f}" if ring else "-"
            text.append(
                f"| {name} | {ranks} | {row['seconds_of_parts']['step']:.3f} s "
                f"| {predicted(by_ranks, ranks, cores):.3f} s "
                f"| {row['throughput']:.2f} | {more} |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    rows = [row for row in json.loads(arguments.file.read_text()) if "ranks" in row]
    print(markdown(rows, arguments.cores), end="")


if __name__ == "__main__":
    main()
