"""The founding text's headline table on real engines, and what a graph launch costs over its nodes.

`measure` runs on a GPU and leaves a report of raw samples; figures, plots and the README's table are made from that report,
here or anywhere.
"""
