"""How much a search may look at, and how much of it each of its turns."""

from __future__ import annotations

from sparsepipe.partition.activation_checkpointing.work import Work


def test_each_turn_has_its_part_of_what_is_left() -> None:
    work = Work(4000)
    done = []
    for turns in (4, 3, 2, 1):
        work.allow(turns=turns)
        looks = 0
        while not work.is_done:
            work.look(10)
            looks += 10
            if turns == 3:
                break  # which leaves the rest to those that follow
        done.append(looks)
        assert work.is_all_done == (turns == 1)
    assert done == [1000, 10, 1500, 1490]


def test_without_an_end_there_is_none() -> None:
    work = Work()
    work.allow(turns=3)
    work.look(10**12)
    work.look_at_pairs(10**12)
    assert not work.is_done
    assert not work.is_all_done


def test_bounds_have_a_part_of_all_work() -> None:
    """Whatever else was done, and however much of it may be done for now."""
    work = Work(4000)
    work.allow(turns=10)
    work.look(3000)
    assert work.may_bound
    work.look_at_bounds(places=100, pairs=700_000)
    assert work.may_bound
    work.look_at_bounds(places=100, pairs=0)
    assert not work.may_bound
    assert work.done == 3000 + 910 + 210


def test_many_pairs_are_more_work_than_few() -> None:
    few, many = Work(1000), Work(1000)
    for _ in range(5):
        few.look_at_pairs(1)
        many.look_at_pairs(10**6)
    assert not few.is_all_done
    assert many.is_all_done
