"""Releases of others, as events of dp_accounting, in the account of a plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vgrad import checks
from vgrad.dp.accounting import Steps
from vgrad.dp.sampling import check_rate

_FUNCTION = "Plan.after(event)"


@dataclass(frozen=True)
class Event:
    """Gaussian releases of others, and the words that name them."""

    words: str
    steps: tuple[Steps, ...]

    def __post_init__(self) -> None:
        self.__dict__["steps"] = tuple(map(_term, self.steps))

    @classmethod
    def of(cls, event: Any, words: object) -> "Event":
        """Return an event of dp_accounting with its words, both checked."""
        steps = tuple(_steps(event, 1))
        if not isinstance(words, str) or not words.strip():
            raise ValueError(
                f"Plan.after(event, words={checks.shown(words)}): expected words that "
                f"name the releases, such as words='a histogram of the labels'."
            )
        return cls(words, steps)


def _term(values: Any) -> Steps:
    """Return a term of an account, of which JSON has made lists."""
    rate, noise, steps, truncated, neighbours = values
    return Steps(rate, noise, steps, truncated and tuple(truncated), neighbours)


def _steps(event: Any, count: int) -> Iterator[Steps]:
    rate, truncated, gaussian = 1.0, None, event
    match type(event).__name__:
        case "ComposedDpEvent":
            for part in event.events:
                yield from _steps(part, count)
            return
        case "SelfComposedDpEvent":
            numbers = {"minimum": 1, "count": event.count}
            [times] = checks.integers(_FUNCTION, **numbers)
            yield from _steps(event.event, count * times)
            return
        case "NoOpDpEvent":
            return
        case "PoissonSampledDpEvent":
            rate, gaussian = event.sampling_probability, event.event
        case "TruncatedSubsampledGaussianDpEvent":
            sizes = {"largest": event.truncated_batch_size, "size": event.dataset_size}
            rate, truncated = event.sampling_probability, tuple(sizes.values())
            checks.integers(_FUNCTION, minimum=1, **sizes)
    if truncated is None and type(gaussian).__name__ != "GaussianDpEvent":
        raise TypeError(
            f"Plan.after(other): expected a Plan, or a DpEvent of Gaussian releases, "
            f"also sampled or truncated, got a {type(event).__name__}."
        )
    noise = {"noise_multiplier": gaussian.noise_multiplier}
    [noise] = checks.non_negative(_FUNCTION, **noise)
    yield Steps(check_rate(_FUNCTION, rate), float(noise), count, truncated)
