"""Which ranks have channels to each other, and how many messages these hold."""

from __future__ import annotations

from sparsepipe.runtime.transport.serialization import Route, default_depth, routes
from tests.support.plans import plan_of
from tests.support.transport_cases import A, B, G, R


def test_routes_of_two_stages() -> None:
    # A batch travels with the activation.
    assert routes(plan_of("2-1")) == (
        Route(A, 0, 2),
        Route(G, 2, 0),
        Route(A, 1, 2),
        Route(G, 2, 1),
        Route(R, 2, 0),
        Route(R, 2, 1),
    )


def test_routes_of_three_stages() -> None:
    assert routes(plan_of("1-2-1")) == (
        Route(A, 0, 1),
        Route(G, 1, 0),
        Route(A, 0, 2),
        Route(G, 2, 0),
        Route(A, 1, 3),
        Route(G, 3, 1),
        Route(A, 2, 3),
        Route(G, 3, 2),
        Route(R, 3, 0),
        Route(B, 0, 3),
    )


def test_the_depth_is_the_upper_stages_warm_up_and_one() -> None:
    plan = plan_of("1-1-1")
    depths = {(r.kind, r.source, r.target): default_depth(plan, r) for r in routes(plan)}
    assert depths == {
        (A, 0, 1): 3,
        (G, 1, 0): 3,
        (A, 1, 2): 2,
        (G, 2, 1): 2,
        (B, 0, 2): 3,
        (R, 2, 0): 3,
    }
