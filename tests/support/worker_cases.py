"""The worker on threads of one process: everything as between real ranks, but for the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from sparsepipe.runtime.asynchronous_worker import AsynchronousWorker
from sparsepipe.runtime.stage import Stage
from sparsepipe.runtime.transport import Kind, Message
from sparsepipe.runtime.weights import Weights
from sparsepipe.schedule import Plan
from tests.support.weights_cases import Case, given, loss_of

LIMIT_S = 30.0


class Hall:
    """Where ranks meet. One of them computes at a time, until it waits for another."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.errors: list[BaseException] = []

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets others go on until it is so."""
        self.turn.notify_all()
        in_time = self.turn.wait_for(lambda: bool(self.errors) or ready(), timeout=LIMIT_S)
        assert in_time, "nobody can go on"
        assert not self.errors, "another rank failed"

    def run(self, works: Iterable[Callable[[], None]]) -> None:
        """Runs what each rank does; raises the first error."""
        threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _run(self, work: Callable[[], None]) -> None:
        with self.turn:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            self.turn.notify_all()


class LocalNetwork:
    """Of one rank; the messages of all are in one place."""

    def __init__(self, hall: Hall, mail: dict[Any, Message], rank: int) -> None:
        self._hall, self._mail, self._rank = hall, mail, rank

    def send(self, kind: Kind, to_rank: int, message: Message, *, held_back: bool = False) -> None:
        self._mail[kind, self._rank, to_rank, message.minibatch] = message

    def receive(self, kind: Kind, from_rank: int, *, minibatch: int) -> Message:
        key = (kind, from_rank, self._rank, minibatch)
        self._hall.wait(lambda: key in self._mail)
        return self._mail.pop(key)

    def release(self, minibatch: int) -> None:
        pass


Rounds = dict[int, dict[int, tuple[Mapping[str, Tensor | None], int]]]


class LocalReplicas:
    """Of one rank; the rounds of all of its stage are in one place."""

    def __init__(self, hall: Hall, rounds: Rounds, *, replica: int, count: int) -> None:
        self._hall, self._rounds, self._replica, self._count = hall, rounds, replica, count
        self._number = 0

    def average(
        self, gradients: Mapping[str, Tensor | None], *, minibatches: int
    ) -> dict[str, Tensor | None]:
        came = self._rounds.setdefault(self._number, {})
        self._number += 1
        came[self._replica] = (gradients, minibatches)
        self._hall.wait(lambda: len(came) == self._count)
        every = [
            found for _, (found, some) in sorted(came.items(), key=lambda item: item[0]) if some
        ]
        return {n: sum(found[n] for found in every) / len(every) for n in every[0]}

    def average_statistics_(self, buffers: Iterable[Tensor]) -> None:
        pass


class Rank:
    """A worker with what it works on; both its ends of the pipeline, and its listener."""

    def __init__(
        self,
        case: Case,
        plan: Plan,
        number: int,
        mode: str,
        *,
        optimizer: Callable[[Any], Any],
        network: LocalNetwork,
        replicas: LocalReplicas,
    ) -> None:
        self.case, self.plan, self.number = case, plan, number
        self.network = case.fresh()
        stage = plan.stage_of(number)
        first, last = plan.stages[stage].layers
        own = {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if first <= int(name.split(".")[0]) <= last
        }
        self.own = nn.ParameterDict({n.replace(".", "/"): p for n, p in own.items()})
        self.optimizer = optimizer(list(own.values())) if own else None
        self.weights = Weights(own, mode, self.optimizer, replicas=plan.replicas(stage))
        self.worker = AsynchronousWorker(
            plan=plan,
            rank=number,
            stage=Stage(self.network, self.network, first=first, last=last),
            weights=self.weights,
            replicas=replicas,  # type: ignore[arg-type]
            network=network,  # type: ignore[arg-type]
            steps=self,  # type: ignore[arg-type]
            events=self,
        )
        self.worker.segments = []
        self.steps: list[int] = []

    def train(self, minibatches: int) -> None:
        """From one drain to the next."""
        readers = self.plan.replicas(0)
        for first in range(0, minibatches, readers):
            batch = self.case.batch(first + self.number) if self.number < readers else None
            self.worker.feed(batch, count=min(readers, minibatches - first), number=first)
        self.worker.drain([])

    def open(self, batch: Any) -> tuple[Any, Any]:
        return batch, None

    def close(self, rest: Any, run: Callable[[], Any]) -> tuple[Tensor, Any]:
        return loss_of(run()), None

    def whole(self, batch: Any, run: Callable[[Any], Any]) -> tuple[Tensor, Any]:
        return loss_of(run(batch)), None

    def before_backward(self, loss: Tensor) -> None:
        pass

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        self.steps.append(step)
        if self.optimizer is not None:
            given(self.optimizer, self.own, {n.replace(".", "/"): g for n, g in gradients.items()})

    def done(self, minibatch: int, *, loss: Tensor, logs: Any) -> None:
        pass


class Pipeline:
    """All ranks of a plan."""

    def __init__(
        self, case: Case, plan: Plan, mode: str, *, optimizer: Callable[[Any], Any]
    ) -> None:
        self.plan = plan
        self.hall = Hall()
        mail: dict[Any, Message] = {}
        rounds: list[Rounds] = [{} for _ in plan.stages]
        self.ranks = [
            Rank(
                case,
                plan,
                number,
                mode,
                optimizer=optimizer,
                network=LocalNetwork(self.hall, mail, number),
                replicas=LocalReplicas(
                    self.hall,
                    rounds[plan.stage_of(number)],
                    replica=plan.replica_of(number),
                    count=plan.replicas(plan.stage_of(number)),
                ),
            )
            for number in range(plan.num_ranks)
        ]

    def run(self, minibatches: int) -> None:
        """Trains from one drain to the next."""
        self.hall.run([lambda rank=rank: rank.train(minibatches) for rank in self.ranks])  # type: ignore[misc]
