"""A bounded queue between the worker and a channel's thread, every wait with a limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Ended(Exception):
    """Nothing more will come out of a mailbox."""


class Mailbox(Generic[_Item]):
    """First in, first out, for one producer and one consumer.

    Every wait ends at once when the mailbox fails, and raises the error it was given.

    Args:
        depth: items it holds; a producer waits for room.
    """

    def __init__(self, depth: int) -> None:
        assert depth >= 1
        self._depth = depth
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._unwanted = False
        self._error: Exception | None = None
        self.discarded = 0
        """Items that came, or were waiting, after the consumer left."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Adds an item.

        Args:
            item: the newest.
            limit_s: of the wait for room; None: as long as it takes.
            room: items that it holds for this producer, at most as many as it holds at all.

        Raises:
            TimeoutError: there was no room within ``limit_s``.
        """
        self.wait_for_room(limit_s=limit_s, room=room)
        with self._changed:
            if self._unwanted:
                self.discarded += 1
            else:
                self._items.append(item)
            self._changed.notify_all()

    def wait_for_room(self, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Returns when the producer can put an item without waiting; see :meth:`put`.

        Raises:
            TimeoutError: there was no room within ``limit_s``.
        """
        depth = self._depth if room is None else min(room, self._depth)
        with self._changed:
            self._wait(lambda: self._unwanted or len(self._items) < depth, limit_s)
            assert not self._ended, "the producer has ended this mailbox"

    def get(self, *, limit_s: float | None = None) -> _Item:
        """Takes the oldest item.

        Raises:
            TimeoutError: none came within ``limit_s``.
            Ended: none will come.
        """
        with self._changed:
            self._wait(lambda: bool(self._items) or self._ended, limit_s)
            if not self._items:
                raise Ended
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[_Item]:
        """Takes items as they come, until the end."""
        while True:
            try:
                item = self.get()
            except Ended:
                return
            yield item
            del item  # what a consumer has done with is not kept alive here

    def end(self) -> None:
        """The producer's last word."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard(self) -> None:
        """The consumer's last word: what waits, and what still comes, is dropped."""
        with self._changed:
            self._unwanted = True
            self.discarded += len(self._items)
            self._items.clear()
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Makes every wait, now and later, raise ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], limit_s: float | None) -> None:
        met = self._changed.wait_for(lambda: self._error is not None or ready(), limit_s)
        if self._error is not None:
            raise self._error
        if not met:
            raise TimeoutError
