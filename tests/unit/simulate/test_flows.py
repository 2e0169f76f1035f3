"""When messages come that share ports, against a plain simulation of the shares."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from sparsepipe.simulate.flows import Events, Flow, Flows


@dataclass(frozen=True)
class Message:
    start_s: float
    ports: tuple[int, ...]
    num_bytes: float


def plain_ends_s(messages: list[Message], speeds: list[float]) -> list[float]:
    """From each begin or end to the next, all shares are worked out anew."""
    ends_s = [0.0] * len(messages)
    left = {k: message.num_bytes for k, message in enumerate(messages)}
    now_s = 0.0
    while left:
        moving = [k for k in left if messages[k].start_s <= now_s]
        through = [sum(port in messages[k].ports for k in moving) for port in range(len(speeds))]
        rates = {k: min(speeds[p] / through[p] for p in messages[k].ports) for k in moving}
        later = [messages[k].start_s for k in left if messages[k].start_s > now_s]
        then_s = min([now_s + left[k] / rates[k] for k in moving] + later)
        for k in moving:
            if now_s + left[k] / rates[k] <= then_s * (1 + 1e-13):
                ends_s[k] = then_s
                del left[k]
            else:
                left[k] -= rates[k] * (then_s - now_s)
        now_s = then_s
    return ends_s


def drawn(seed: int) -> tuple[list[Message], list[float]]:
    """Some alone, some in a crowd, some at the same time."""
    draw = random.Random(seed)
    speeds = [10.0, *(draw.choice([5.0, 20.0, float("inf")]) for _ in range(4))]
    messages: list[Message] = []
    time_s = 0.0
    for _ in range(40):
        time_s += draw.choice([0.0, draw.uniform(0.0, 2.0), draw.uniform(0.0, 20.0)])
        ports = tuple(draw.sample(range(5), draw.choice([1, 2])))
        if any(speeds[port] < float("inf") for port in ports):
            messages.append(Message(time_s, ports, draw.uniform(1.0, 60.0)))
    return messages, speeds


@pytest.mark.parametrize("is_predicted", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_each_message_ends_by_its_shares(seed: int, is_predicted: bool) -> None:
    """Whether all ends are events, or only those that are not predicted."""
    messages, speeds = drawn(seed)
    events = Events()
    flows = Flows(events, speeds)
    told_s: dict[int, float] = {}
    ways: list[Flow] = []
    for number, message in enumerate(messages):

        def done(number: int = number) -> None:
            told_s[number] = events.now_s

        way = flows.way(message.ports, message.num_bytes, done=done, is_predicted=is_predicted)
        ways.append(way)
        events.at(message.start_s, flows.start, way)
    events.run()
    expected_s = plain_ends_s(messages, speeds)
    assert [way.end_s for way in ways] == pytest.approx(expected_s, rel=1e-9)
    assert all(ways[number].end_s == time_s for number, time_s in told_s.items())
    if not is_predicted:
        assert len(told_s) == len(messages)


def test_a_message_alone_is_no_event_where_it_is_foreseen() -> None:
    events = Events()
    flows = Flows(events, [10.0])
    way = flows.way((0,), 50.0, is_predicted=True)
    flows.start(way)
    assert (way.end_s, events.next_s) == (5.0, float("inf"))


def test_the_receiver_is_called_when_the_arrival_changes() -> None:
    """50 bytes alone; from 2 s on beside 10 others, which take 2 s at half the speed."""
    events = Events()
    flows = Flows(events, [10.0])
    heard: list[tuple[float, float]] = []
    way = flows.way(
        (0,), 50.0, retimed=lambda: heard.append((events.now_s, way.end_s)), is_predicted=True
    )
    other = flows.way((0,), 10.0, is_predicted=True)
    flows.start(way)
    events.at(2.0, flows.start, other)
    events.run()
    assert heard == [(2.0, 8.0), (4.0, 6.0)]
    assert (way.end_s, other.end_s) == (6.0, 4.0)
