"""Which rank has which domains."""

from __future__ import annotations

import pytest

from sparsepipe.domains import Placement
from sparsepipe.errors import ConfigError


@pytest.mark.parametrize("roles", ["equal", "separate"])
@pytest.mark.parametrize("ranks", range(1, 20))
@pytest.mark.parametrize("count", range(2, 9))
def test_every_domain_has_its_share(count: int, ranks: int, roles: str) -> None:
    domains = tuple(f"d{number}" for number in range(count))
    if roles == "separate" and ranks == 1:
        with pytest.raises(ConfigError, match="leaves none for domains"):
            Placement(domains, ranks, "separate")
        return
    placement = Placement(domains, ranks, roles)  # type: ignore[arg-type]
    encoders = ranks - (roles == "separate")
    held = [placement.domains_of(rank) for rank in range(ranks)]
    assert all(held[:encoders]), "every rank that has domains has one at least"
    assert not any(held[encoders:])
    order = [domains.index(name) for each in held for name in each]
    assert order == sorted(order), "samples of ranks, joined, are in the order of the domains"
    copies = [order.count(number) for number in range(count)]
    sizes = [len(each) for each in held[:encoders]]
    if encoders >= count:
        assert set(sizes) == {1}
        assert max(copies) - min(copies) <= 1
    else:
        assert set(copies) == {1}
        assert max(sizes) - min(sizes) <= 1
    for name in domains:
        ranks_of = placement.ranks_of(name)
        assert ranks_of == tuple(rank for rank in range(ranks) if name in held[rank])
        assert [placement.replica(rank) for rank in ranks_of] == [
            (number, len(ranks_of)) for number in range(len(ranks_of))
        ]
