"""From times between ranks to the links of an inventory, and how well they foretell all-reduces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from sparsepipe.cluster import Inventory, Link
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.devices import Fleet, Kind
from sparsepipe.runtime.bandwidth import MessageTime, ReductionTime
from sparsepipe.utils.tables import markdown_table

_UNLIKE = 2.0
"""Times as fast: pairs that differ by more are warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured, by hosts.

    Args:
        host_of: the host of each rank.
        sendings: messages between ranks.
        reductions: sums over ranks.
    """

    host_of: Sequence[str]
    sendings: Sequence[MessageTime]
    reductions: Sequence[ReductionTime]

    @property
    def inside(self) -> dict[str, Link]:
        """The link inside each host that has several ranks."""
        found = {host: self._link({host}) for host in dict.fromkeys(self.host_of)}
        return {host: link for host, link in found.items() if link is not None}

    @property
    def between(self) -> Link | None:
        """The link between any two hosts; None where there is one host."""
        return self._link(None)

    def eq4_s(self, reduction: ReductionTime) -> float:
        """What the paper's Eq. 4 takes for the sum, as the partitioner counts it."""
        fleet = self._fleet
        hosts = [self.host_of[rank] for rank in reduction.ranks]
        slowest = fleet.sync_bytes_per_s([hosts.count(kind.host) for kind in fleet.kinds])
        return cost_model("eq4").sync_s(
            reduction.size_bytes, replicas=len(hosts), bytes_per_s=slowest
        )

    def put_into(self, inventory: Inventory) -> Inventory:
        """The inventory with these links; others stay. Hosts that it does not have come new."""
        inside = self.inside
        names = list(dict.fromkeys(self.host_of))
        like = inventory.hosts[0]
        hosts = (
            inventory.hosts
            if len(inventory.hosts) > 1
            else tuple(replace(like, name=name) for name in names)
        )
        return Inventory(
            hosts=tuple(replace(host, link=inside.get(host.name, host.link)) for host in hosts),
            link=self.between or inventory.link,
        )

    @property
    def named(self) -> list[tuple[str, str | None, Link]]:
        """All links: what each is called, the host that it is inside of, and its figures."""
        found: list[tuple[str, str | None, Link]] = []
        found += [(f"inside {host}", host, link) for host, link in self.inside.items()]
        return found + ([] if self.between is None else [("between hosts", None, self.between)])

    def spread(self, host: str | None) -> tuple[float, float]:
        """The lowest and the highest bytes a second that a link's figure is the median of."""
        rates = [sending.bytes_per_s for sending in self._over({host} if host else None)]
        return min(rates), max(rates)

    def unlike(self, host: str | None) -> float:
        """How many times as fast a link's fastest pair is as its slowest, by medians over ways."""
        of_pair: dict[frozenset[int], list[float]] = {}
        for s in self._over({host} if host else None):
            of_pair.setdefault(frozenset((s.source, s.target)), []).append(s.bytes_per_s)
        rates = [statistics.median(found) for found in of_pair.values()]
        return max(rates) / min(rates)

    @property
    def _fleet(self) -> Fleet:
        inside, between = self.inside, self.between
        names = dict.fromkeys(self.host_of)
        return Fleet(
            kinds=tuple(Kind(name=n, host=n, count=self.host_of.count(n)) for n in names),
            inside={n: inside[n].bytes_per_s if n in inside else math.inf for n in names},
            between=math.inf if between is None else between.bytes_per_s,
        )

    def _link(self, hosts: set[str] | None) -> Link | None:
        found = self._over(hosts)
        if not found:
            return None
        return Link(
            bytes_per_s=_rounded(statistics.median(s.bytes_per_s for s in found)),
            latency_s=_rounded(statistics.median(s.latency_s for s in found)),
        )

    def _over(self, hosts: set[str] | None) -> list[MessageTime]:
        """Of the largest messages one way, those inside a host, or (None) between any two."""
        most = max(sending.size_bytes for sending in self.sendings)
        return [
            sending
            for sending in self.sendings
            if sending.size_bytes == most
            and not sending.both_ways
            and (len(self._hosts(sending)) == 2 if hosts is None else self._hosts(sending) == hosts)
        ]

    def _hosts(self, sending: MessageTime) -> set[str]:
        return {self.host_of[sending.source], self.host_of[sending.target]}


def _rounded(value: float) -> float:
    """To four digits: no link is measured more exactly."""
    return float(f"{value:.4g}")


def as_json(links: Links) -> dict[str, Any]:
    """All of it, for ``bandwidth.json``."""
    between = links.between
    return {
        "hosts": {host: asdict(link) for host, link in links.inside.items()},
        "between": None if between is None else asdict(between),
        "pairs": [
            {
                "source": s.source,
                "target": s.target,
                "source_host": links.host_of[s.source],
                "target_host": links.host_of[s.target],
                "bytes": s.size_bytes,
                "both_ways": s.both_ways,
                "seconds": s.seconds,
                "bytes_per_s": s.bytes_per_s,
                "latency_s": s.latency_s,
                "repeats": s.repeats,
            }
            for s in links.sendings
        ],
        "all_reduce": [
            {
                "ranks": list(r.ranks),
                "hosts": list(dict.fromkeys(links.host_of[rank] for rank in r.ranks)),
                "how": r.how,
                "bytes": r.size_bytes,
                "seconds": r.seconds,
                "eq4_s": links.eq4_s(r),
                "over_eq4": r.seconds / links.eq4_s(r),
                "repeats": r.repeats,
            }
            for r in links.reductions
        ],
    }


def as_rows(links: Links) -> list[dict[str, Any]]:
    """All of it, for ``bandwidth.csv``: a row for each measurement."""
    told = as_json(links)
    rows: list[Mapping[str, Any]] = [
        {
            "what": "both ways" if pair["both_ways"] else "one way",
            "ranks": f"{pair['source']} {pair['target']}",
            "hosts": " ".join(dict.fromkeys((pair["source_host"], pair["target_host"]))),
            **pair,
        }
        for pair in told["pairs"]
    ]
    rows += [
        {
            **entry,
            "what": entry["how"],
            "ranks": " ".join(map(str, entry["ranks"])),
            "hosts": " ".join(entry["hosts"]),
        }
        for entry in told["all_reduce"]
    ]
    columns = ("what", "ranks", "hosts", "bytes", "seconds", "bytes_per_s", "latency_s", "eq4_s",
               "over_eq4", "repeats")  # fmt: skip
    return [{column: row.get(column) for column in columns} for row in rows]


def as_text(links: Links) -> str:
    """All of it as tables, with the links as YAML for an inventory at the end."""
    parts = ["MB/s from rank to rank, by size of message", _pair_table(links)]
    parts += ["sums over ranks", _sum_table(links.reductions, links)]
    for what, host, link in links.named:
        lowest, highest = links.spread(host)
        parts.append(
            f"{what}: {link.bytes_per_s / 1e6:,.4g} MB/s (median of {lowest / 1e6:,.4g} to "
            f"{highest / 1e6:,.4g}), latency {1e6 * link.latency_s:,.4g} us"
        )
    parts.append("for an inventory in conf/hardware:\n" + snippet(links).rstrip())
    return "\n".join(parts)


def doubts(links: Links) -> list[str]:
    """Where one figure for a link hides pairs that are unlike."""
    return [
        f"{what} one pair of ranks is {ratio:.1f} times as fast as another: the link's one figure, "
        "with which the partitioner counts, is their median (bandwidth.json has them all)"
        for what, host, _ in links.named
        if (ratio := links.unlike(host)) > _UNLIKE
    ]


def snippet(links: Links) -> str:
    """The links as an inventory has them, in YAML."""
    hosts = [{"name": host, "link": asdict(link)} for host, link in links.inside.items()]
    value: dict[str, Any] = {"hosts": hosts} if hosts else {}
    if links.between is not None:
        value["link"] = asdict(links.between)
    return yaml.safe_dump(value, sort_keys=False)


def _pair_table(links: Links) -> str:
    sizes = sorted({sending.size_bytes for sending in links.sendings})
    ways = dict.fromkeys((s.source, s.target) for s in links.sendings)
    both = {frozenset((s.source, s.target)): s for s in links.sendings if s.both_ways}
    rows = []
    for source, target in ways:
        one = [s for s in links.sendings if (s.source, s.target) == (source, target)]
        rate = {s.size_bytes: s.bytes_per_s for s in one if not s.both_ways}
        rows.append(
            (
                f"{source} to {target}",
                " to ".join(dict.fromkeys((links.host_of[source], links.host_of[target]))),
                *(f"{rate[size] / 1e6:,.1f}" for size in sizes),
                f"{both[frozenset((source, target))].bytes_per_s / 1e6:,.1f}",
                f"{1e6 * one[0].latency_s:,.0f}",
            )
        )
    head = ("ranks", "host", *map(_size, sizes), f"{_size(sizes[-1])} each way", "latency us")
    return markdown_table(head, rows)


def _sum_table(reductions: Iterable[ReductionTime], links: Links) -> str:
    rows = [
        (
            " ".join(map(str, r.ranks)),
            r.how,
            _size(r.size_bytes),
            f"{1e3 * r.seconds:,.2f}",
            f"{1e3 * links.eq4_s(r):,.2f}",
            f"{r.seconds / links.eq4_s(r):.2f}",
        )
        for r in reductions
    ]
    return markdown_table(("ranks", "how", "size", "ms", "Eq. 4 ms", "ratio"), rows)


def _size(size_bytes: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"
