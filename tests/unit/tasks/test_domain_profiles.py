"""Profiles of networks of domains, and simulations by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.config.schema import Parallel
from sparsepipe.domains import Placement, sent_numbers
from sparsepipe.errors import ConfigError, ProfileError
from sparsepipe.models import DomainSeparation, dsn_2d
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.tasks.domain_parts import of_domains, parts_of, state_of
from sparsepipe.tasks.simulate_domains import Domains, check_parallel
from sparsepipe.utils.files import read_json

NAMES = ("source", "near", "far")
BATCH = 4


def module(norm: str = "domain") -> DomainSeparation:
    torch.manual_seed(0)
    network = dsn_2d(3, domains=NAMES, width=0.1, code=6, decoded=[8, 8], norm=norm)  # type: ignore[arg-type]
    return DomainSeparation(network, optimizer=partial(torch.optim.SGD, lr=0.1))


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: {
            "input": torch.rand(BATCH, 1, 8, 8, generator=generator),
            "label": torch.arange(BATCH) % 3,
            "index": torch.arange(BATCH),
        }
        for name in NAMES
    }


def profile() -> Profile:
    made = module()
    return measure(
        parts_of(made),
        [state_of(made, batch())],
        device=torch.device("cpu"),
        num_warmup=1,
        num_measured=2,
        optimizer=made.make_optimizer,
        meta=of_domains(made),
    )


def inventory(count: int) -> Inventory:
    devices = (Device(name="core", count=count),)
    return Inventory(hosts=(Host(name="here", devices=devices, link=Link(bytes_per_s=1e6)),))


def simulated(count: int, found: Profile) -> Domains:
    return Domains.of(inventory(count), {"core": found}, batch_size=BATCH, algorithm="ring")


@pytest.mark.parametrize("norm", ["none", "domain"])
def test_the_parts_in_a_row_compute_the_objective(norm: str) -> None:
    made = module(norm)
    parts = parts_of(made)
    objective = parts(state_of(made, batch()))
    objective.backward()
    found = {name: each.grad.clone() for name, each in made.named_parameters()}
    made.zero_grad()
    expected = made.losses(made.decoded(made.encoded(batch()))).objective
    expected.backward()
    assert torch.allclose(objective, expected, rtol=1e-6)
    for name, each in made.named_parameters():
        assert torch.allclose(found[name], each.grad, atol=1e-6), name


def test_a_profile_has_each_encoder_and_counts_shared_parameters_once() -> None:
    found = profile()
    names = [each.name for each in found.layers]
    own = [f"{kind}/{name}" for name in NAMES for kind in ("private", "shared", "decoder")]
    assert names == [*own, "losses"]
    every = sum(each.nbytes for each in module().parameters())
    assert sum(each.parameter_bytes for each in found.layers) == every
    assert found.meta["domains"] == list(NAMES)
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in found.layers)


def test_a_rank_costs_its_own_domains_and_all_losses() -> None:
    found = profile()
    by_name = {each.name: each for each in found.layers}
    two = simulated(2, found).steps.costs  # source; near and far
    assert two[0].encode_s == sum(
        by_name[f"{kind}/source"].forward_s for kind in ("private", "shared", "decoder")
    )
    losses = by_name["losses"]
    assert two[0].losses_s == two[1].losses_s == losses.forward_s + losses.backward_s
    computed = sum(each.encode_s + each.backward_s for each in two) + two[0].losses_s
    assert computed == pytest.approx(found.compute_s)
    alone = simulated(1, found)
    assert alone.steps.minibatch_s() == pytest.approx(alone.alone_s)
    assert alone.values(minibatches=7)["speedup_over_one_device"] == pytest.approx(1)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_bytes_are_those_that_are_counted_of_a_training(ranks: int) -> None:
    made = simulated(ranks, profile())
    placement = Placement(NAMES, ranks)
    samples = [BATCH * len(placement.domains_of(rank)) for rank in range(ranks)]
    for rank, row in enumerate(made.rows()):
        numbers = sent_numbers(placement, rank, samples=samples, code=6, target=64)
        assert row["sent_bytes"] == 4 * numbers
        sent = [each for each in made.steps.record(1).transfers if each.rank == rank]
        assert sum(each.num_bytes for each in sent) == pytest.approx(4 * numbers)
    assert [len(each.ranks) for each in made.steps.private] == [2] * 3 * (ranks == 6)


def test_unlike_devices_wait_for_each_other_and_have_profiles_of_one_network() -> None:
    found = profile()
    slow = replace(
        found, layers=tuple(replace(each, forward_s=9 * each.forward_s) for each in found.layers)
    )
    devices = tuple(Device(name=name, count=1) for name in ("core", "slow"))
    hosts = Inventory(hosts=(Host(name="here", devices=devices, link=Link(bytes_per_s=1e9)),))
    made = Domains.of(hosts, {"core": found, "slow": slow}, batch_size=BATCH, algorithm="ring")
    quick, late = made.rows()
    assert quick["busy_share"] < late["busy_share"]
    others = replace(slow, meta={**slow.meta, "domains": ["source", "near", "else"]})
    with pytest.raises(ProfileError, match="source, near, far; source, near, else"):
        Domains.of(hosts, {"core": found, "slow": others}, batch_size=BATCH, algorithm="ring")


def test_the_commands_measure_and_simulate(job: Callable[..., Path]) -> None:
    sizes = [f"data.domains.{name}.source.train_images=16" for name in ("digits", "blended")]
    model = ("model=dsn_2d", "model.width=0.1", "model.code=8")
    words = (*model, "data=digit_domains", "data.targets=1", "data.batch_size=8", *sizes)
    measured = job(*words, "task=profile", "task.num_warmup=1", "task.num_measured=2")
    found = Profile.load(measured / "profile.json")
    assert found.meta["domains"] == ["digits", "blended"]
    given = f"task.profiles={{core: {measured / 'profile.json'}}}"
    done = job(*words, "task=simulate", "parallel=domain", "hardware=equal_devices", given)
    result = read_json(done / "result.json")
    assert (result["kind"], result["shapes_per_minibatch"]) == ("simulated", 8 * 8)
    files = {"simulation.txt", "devices.csv", "timeline.png", "trace.json"}
    assert files <= {path.name for path in done.iterdir()}
    with pytest.raises(ConfigError, match=r"task\.microbatches is for a chain of layers"):
        job(*words, "task=profile", "task.microbatches=2")


@pytest.mark.parametrize("given", [{"schedule": "gpipe"}, {"overlap": True}])
def test_settings_of_pipelines_are_refused(given: dict[str, Any]) -> None:
    parallel = Parallel(devices=2, num_nodes=1, grace_s=1, strategy=None, roles="equal")
    with pytest.raises(ConfigError, match=r"parallel\.roles=separate take"):
        check_parallel(replace(parallel, roles="separate"), others={})
    with pytest.raises(ConfigError, match=rf"task\.{next(iter(given))} is for pipelines"):
        check_parallel(parallel, others=given)
