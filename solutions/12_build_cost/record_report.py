"""Record `inspector_report.json` on the GPU of this machine: what the inspector says of a small FP16 network.

Run in the repository's root, in an environment with CuPy and TensorRT: ``python solutions/12_build_cost/record_report.py``.
It runs the chapter's own given cells, so network and configuration are those that the learner reads.
"""

import json
import time
from pathlib import Path

import jupytext
import numpy as np

FOLDER = Path(__file__).resolve().parent
CHANNELS = (3, 32, 64, 64)


def given_names() -> dict:
    """The names that the chapter's given cells define, up to the first that reads the recorded report."""
    names: dict = {"__name__": "__main__"}
    for cell in jupytext.read(FOLDER / f"{FOLDER.name}.py").cells:
        if cell.cell_type != "code" or "demo" in cell.metadata.get("tags", []):
            continue
        if "inspector_report.json" in cell.source:
            return names
        exec(compile(cell.source, "<given cell>", "exec"), names)
    raise SystemExit("no cell reads inspector_report.json")


def main() -> None:
    names = given_names()
    trt = names["trt"]
    weights = [w.astype(np.float16) for w in names["random_weights"](CHANNELS, 1)]
    network = names["conv_network"](weights)
    layers = [network.get_layer(index).name for index in range(network.num_layers)]
    engine = names["runtime"].deserialize_cuda_engine(names["built"](network, names["make_config"]()))
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    record = {
        "gpu": names["THIS_MACHINE"]["gpu"],
        "tensorrt": trt.__version__,
        "recorded_at": time.strftime("%Y-%m-%d"),
        "network_layers": layers,
        "report": json.loads(text),
    }
    (FOLDER / "inspector_report.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
