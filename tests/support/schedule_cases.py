"""Plans for tests of schedules."""

from collections.abc import Iterator

from tests.support.plans import plan_of

__all__ = ["configs", "plan_of"]


def configs(max_ranks: int) -> Iterator[str]:
    """Every way to share up to ``max_ranks`` ranks between stages."""

    def shares(ranks: int) -> Iterator[tuple[int, ...]]:
        if ranks == 0:
            yield ()
        for first in range(1, ranks + 1):
            for rest in shares(ranks - first):
                yield (first, *rest)

    for ranks in range(1, max_ranks + 1):
        yield from ("-".join(map(str, share)) for share in shares(ranks))
