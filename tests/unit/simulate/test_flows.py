"""When messages come that share ports, against a plain simulation of the shares."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest

from sparsepipe.simulate.flows import EventQueue, Flows


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


@pytest.mark.parametrize("seed", range(12))
def test_each_message_ends_by_its_shares(seed: int) -> None:
    messages, speeds = drawn(seed)
    events = EventQueue()
    flows = Flows(events, speeds)
    ends_s: dict[int, float] = {}
    for number, message in enumerate(messages):

        def done(number: int = number) -> None:
            ends_s[number] = events.now_s

        route = flows.route(message.ports, message.num_bytes, done=done)
        events.at(message.start_s, partial(flows.start, route))
    events.run()
    found_s = [ends_s[number] for number in range(len(messages))]
    assert found_s == pytest.approx(plain_ends_s(messages, speeds), rel=1e-9)
