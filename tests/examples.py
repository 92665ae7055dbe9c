"""How many examples hypothesis draws for a test: the profile in use has a say."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Draw so many under a profile of 100 examples, and ten times as many of 1000."""
    return settings(max_examples=number * settings().max_examples // 100)
