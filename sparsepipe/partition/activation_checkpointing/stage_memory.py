"""Bytes that a stage keeps for its backward passes if some of its layers are recomputed.

Each minibatch in flight keeps only the input of a recomputed span; what the layers of the span save
exists for one minibatch at a time, during recomputation and backward pass. A stage with m
minibatches in flight thus keeps m times the bytes of one, plus the bytes inside its largest span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from sparsepipe.profiling import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds and bytes of a layer for a minibatch or a microbatch.

    Args:
        forward_s: seconds of its forward pass.
        saved_bytes: bytes kept for its backward pass.
        begin_bytes: bytes kept in addition if the layer before is recomputed or in another stage:
            its input, and kernel maps that are built again.
        end_bytes: bytes of its output that ``saved_bytes`` of this and earlier layers do not
            include.
        output_bytes: bytes of its output.
    """

    forward_s: float
    saved_bytes: float
    begin_bytes: float
    end_bytes: float
    output_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of a stage's layers; spans are ranges that count from its first layer.

    Args:
        input_bytes: bytes of the first layer's input.
        in_flight: m, the most minibatches at a time between their forward and backward passes, in
            multiples of the largest one.
    """

    layers: tuple[LayerCost, ...]
    input_bytes: float
    in_flight: float

    @classmethod
    def of(
        cls, profile: Profile, *, first: int, last: int, in_flight: float, share: float = 1.0
    ) -> StageCost:
        """Takes the costs of layers ``first`` to ``last``, inclusive, from a profile, for
        minibatches or microbatches of ``share`` times its batch; a layer without ``saved_bytes`` is
        assumed to save its input.
        """
        borders = [profile.input_bytes, *(layer.activation_bytes for layer in profile.layers)]
        rows = [
            LayerCost(
                forward_s=share * layer.forward_s,
                saved_bytes=share * (before if layer.saved_bytes is None else layer.saved_bytes),
                begin_bytes=share * (layer.begin_bytes or 0.0),
                end_bytes=share * (behind if layer.end_bytes is None else layer.end_bytes),
                output_bytes=share * behind,
            )
            for layer, (before, behind) in zip(profile.layers, pairwise(borders), strict=True)
        ]
        return cls(
            layers=tuple(rows[first : last + 1]),
            input_bytes=share * borders[first],
            in_flight=in_flight,
        )

    @classmethod
    def worst(cls, costs: Sequence[StageCost]) -> StageCost:
        """Combines costs of a stage on several devices: the highest times and bytes by layer."""
        names = [field.name for field in fields(LayerCost)]
        return cls(
            layers=tuple(
                LayerCost(**{name: max(getattr(layer, name) for layer in each) for name in names})
                for each in zip(*(cost.layers for cost in costs), strict=True)
            ),
            input_bytes=max(cost.input_bytes for cost in costs),
            in_flight=max(cost.in_flight for cost in costs),
        )

    def time_s(self, spans: Sequence[range]) -> float:
        """Seconds of recomputing ``spans`` for each minibatch."""
        return sum(self.layers[layer].forward_s for span in spans for layer in span)

    def kept_bytes(self, spans: Sequence[range]) -> float:
        """Bytes that each minibatch in flight keeps if ``spans`` are recomputed."""
        begins, inside = {s.start for s in spans}, {layer for span in spans for layer in span}
        total, before = 0.0, True  # whether the layer before is recomputed, or in another stage
        for number, layer in enumerate(self.layers):
            if number in begins:
                total += self.border_bytes(number, before)
            elif number not in inside:
                total += layer.saved_bytes + before * layer.begin_bytes
            before = number in inside
        last = self.layers[-1]
        return total + (last.output_bytes if before else last.end_bytes)

    def inside_bytes(self, span: range) -> float:
        """Bytes in use while a span is recomputed, in addition to its input."""
        first = self.layers[span.start]
        anew = max(0.0, first.begin_bytes - self.border_bytes(span.start, True))
        return anew + sum(self.layers[layer].saved_bytes for layer in span)

    def peak_bytes(self, spans: Sequence[range]) -> float:
        """The most bytes kept at a time for backward passes if ``spans`` are recomputed."""
        most = max((self.inside_bytes(span) for span in spans), default=0.0)
        return self.in_flight * self.kept_bytes(spans) + most

    def border_bytes(self, first: int, before: bool) -> float:
        """Bytes of its input that a recomputed span beginning with layer ``first`` keeps.

        ``before``: whether the layer before is recomputed too; if not, the part of its output that
        is saved anyway does not count.
        """
        if first == 0:
            return self.input_bytes
        layer = self.layers[first - 1]
        return layer.output_bytes if before else layer.end_bytes


def most_kept(
    profiles: Sequence[Profile], spans: Sequence[range], *, first: int, last: int
) -> tuple[float, float]:
    """Bytes that a minibatch keeps in the stage of layers ``first`` to ``last`` if ``spans`` are
    recomputed, and bytes inside the largest span, each for the profile with the most.
    """
    own = moved(spans, -first)
    held = [StageCost.of(profile, first=first, last=last, in_flight=1) for profile in profiles]
    kept = max(cost.kept_bytes(own) for cost in held)
    return kept, max((cost.inside_bytes(span) for cost in held for span in own), default=0.0)


def moved(spans: Sequence[range], by: int) -> list[range]:
    """The spans with ``by`` added to their layer numbers."""
    return [range(by + span.start, by + span.stop) for span in spans]
