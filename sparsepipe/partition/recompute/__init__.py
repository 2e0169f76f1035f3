"""Which layers of a stage to recompute: what settings say (``layers``), or what is cheapest.

Of one ``stage`` that is a shortest way through the spans of its layers (``span_table``), by
``prices`` of a byte; of a ``plan`` it is each stage's, which keeps what ``stage_cost`` says. A
search for plan and spans together goes by ``costs``, of ``second_runs`` of layers, and finds both
with few looks thanks to ``bounds``; ``choices`` are what the plan that it has found recomputes.
"""
