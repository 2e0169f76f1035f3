"""Simulated stages that recompute take a forward more in each backward, and keep less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.cluster import Link
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.profiling import Profile
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.memory import long_run_peaks_bytes
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload
from tests.support.instances import profile_of
from tests.support.plans import plan_on

PLAN = plan_on(["here/gpu/0", "here/slow/0"], ["here/gpu/1"], cuts=[2], num_layers=4)
MODEL = MemoryModel(stash=False, optimizer=0.0, gradients=0.0)
PARTS = 4


def profile(*, slower: float = 1.0) -> Profile:
    each = {"backward_s": slower * 3.0, "activation_bytes": 8.0, "saved_bytes": 40.0}
    each |= {"begin_bytes": 0.0, "end_bytes": 8.0}
    costs = [{"forward_s": slower * (1.0 + index), **each} for index in range(4)]
    return profile_of(costs, input_bytes=16.0)


PROFILES = {"gpu": profile(), "slow": profile(slower=2.0)}


def workload(spans: StageSpans) -> Workload:
    return Workload.of(PLAN, PROFILES).recomputing(spans, PROFILES)


def test_backwards_take_the_forwards_of_recomputed_layers() -> None:
    plain, (first, second) = Workload.of(PLAN, PROFILES).stages, workload(((range(2),), ())).stages
    assert second == plain[1]
    assert first.forward_s == plain[0].forward_s == (3.0, 6.0)
    assert first.backward_s == (6.0 + 3.0, 12.0 + 6.0)
    assert first.layers_backward_s == ((5.0, 4.0), (10.0, 8.0))
    assert plain[0].stored_bytes == 40.0 + 40.0 + 8.0
    # What it gets and what it gives; while it goes backward what its layers save.
    assert (first.stored_bytes, first.recomputed_bytes) == (16.0 + 8.0, 80.0)
    one = workload(((range(1, 2),), ())).stages[0]
    assert one.backward_s == (6.0 + 2.0, 12.0 + 4.0)
    assert (one.stored_bytes, one.recomputed_bytes) == (40.0 + 8.0 + 8.0, 40.0)


def test_no_device_keeps_what_only_all_of_its_stage_keep_together() -> None:
    """One saves most in the first layer, the other in the second: neither has both."""
    unlike = {
        name: replace(
            own,
            layers=tuple(
                replace(layer, saved_bytes=saved_bytes)
                for layer, saved_bytes in zip(own.layers, saved, strict=True)
            ),
        )
        for (name, own), saved in zip(
            PROFILES.items(), [(90.0, 10.0, 1.0, 1.0), (20.0, 70.0, 1.0, 1.0)], strict=True
        )
    }
    spans: StageSpans = ((range(2),), ())
    first = Workload.of(PLAN, unlike).recomputing(spans, unlike).stages[0]
    assert (first.stored_bytes, first.recomputed_bytes) == (16.0 + 8.0, 90.0 + 10.0)
    spans = ((range(1, 2),), ())
    first = Workload.of(PLAN, unlike).recomputing(spans, unlike).stages[0]
    assert (first.stored_bytes, first.recomputed_bytes) == (90.0 + 8.0 + 8.0, 70.0)


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", (2, 4)), ("1f1b", (2, 1))])
def test_a_device_keeps_what_the_choice_of_layers_counts(
    schedule: str, in_flight: tuple[int, int]
) -> None:
    setting = Setting(network=ClusterNetwork.flat(3, Link(bytes_per_s=1e9)))
    whole = workload(((range(2),), (range(2, 4),)))
    simulation = Simulation.of(whole, setting, schedule=schedule, microbatches=PARTS)
    share = 2 / PARTS  # of two batches, a part
    first, again, second = long_run_peaks_bytes(simulation, MODEL)
    assert first == again == pytest.approx((in_flight[0] * (16.0 + 8.0) + 80.0) * share)
    assert second == pytest.approx((in_flight[1] * (8.0 + 8.0) + 80.0) * share)
    plain = replace(simulation, workload=Workload.of(PLAN, PROFILES).split(PARTS, batches=2))
    assert simulation.pace(8).minibatch_s > plain.pace(8).minibatch_s
