"""The course's method beside its peers: the same models, inputs and GPU, one recorded stream of changing shapes.

`launchlab peers` runs every peer in a process of its own and writes grader/reports/peers.json; the table in README.md and
the plot beside the report are made from that file alone. Importing this package needs neither a GPU nor any peer's library.
"""

MODELS = ("rec", "bert")
"""PP-OCRv4's recognition model in FP32 without TF32, and BERT-base in FP16; both with batch 1."""


class Absent(Exception):
    """A peer cannot run on this machine; the message says what is missing."""
