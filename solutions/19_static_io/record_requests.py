"""Record `requests.json` on the GPU of this machine: the times of one request of the chapter's engine, for each picture size.

Run in the repository's root, on a GPU that nothing else uses, in an environment with CuPy and TensorRT:
``python solutions/19_static_io/record_requests.py``. It runs the chapter's own given cells, so the engine and the
copies are those that the learner reads.
"""

import json
import time
from functools import partial
from pathlib import Path

import jupytext
import numpy as np

FOLDER = Path(__file__).resolve().parent
NOT_GIVEN = ("solution", "test")


def given_names() -> dict:
    """The names that the chapter's given cells define."""
    names: dict = {"__name__": "__main__"}
    for cell in jupytext.read(FOLDER / f"{FOLDER.name}.py").cells:
        if cell.cell_type == "code" and "demo" not in cell.metadata.get("tags", []) and not any(key in cell.metadata for key in NOT_GIVEN):
            exec(compile(cell.source, "<given cell>", "exec"), names)
    return names


def measure(given: dict, rows: int) -> dict:
    """Median times in µs of one request of ``rows`` rows, from pinned memory; see the chapter for their names."""
    cp, lab, stream = given["cp"], given["lab"], given["stream"]
    context = given["load_context"](given["make_plan"](), rows)
    x, y = (cp.empty(tuple(context.get_tensor_shape(name)), cp.float32) for name in ("x", "y"))
    inbox, outbox = (given["cupyx"].zeros_pinned(each.shape, np.float32) for each in (x, y))
    picture, answer = np.ones(x.shape, np.float32), np.zeros(y.shape, np.float32)
    context.set_tensor_address("x", x.data.ptr)
    context.set_tensor_address("y", y.data.ptr)

    def infer():
        given["require"](context.execute_async_v3(stream.ptr), "enqueue")

    up, down = partial(given["copy_up"], x, inbox, stream), partial(given["copy_down"], outbox, y, stream)

    def whole():
        up()
        infer()
        down()

    def captured(work):
        stream.begin_capture()
        try:
            work()
        finally:
            graph = stream.end_capture()
        return graph

    def host():
        inbox[...] = picture
        answer[...] = outbox

    whole()
    stream.synchronize()
    alone, both = captured(infer), captured(whole)
    end_to_end = lab.compare_us(whole, partial(both.launch, stream), clock="end_to_end", pairs=31)
    return {
        "host_us": lab.submit_us(host, sync=lambda: None).median,
        "h2d_us": given["gpu_us"](up),
        "gpu_us": given["gpu_us"](partial(alone.launch, stream)),
        "d2h_us": given["gpu_us"](down),
        "submit_us": lab.submit_us(whole).median,
        "launch_us": lab.submit_us(partial(both.launch, stream)).median,
        "whole_eager_us": end_to_end.first.median,
        "whole_graph_us": end_to_end.second.median,
    }


def main() -> None:
    given = given_names()
    requests = []
    for name, rows in given["FRAMES"].items():
        times = measure(given, rows)
        requests.append({"name": name, "rows": rows, "pinned": True} | {key: round(value, 1) for key, value in times.items()})
    record = {"gpu": given["lab"].gpu_name(), "tensorrt": given["trt"].__version__, "recorded_at": time.strftime("%Y-%m-%d"), "requests": requests}
    (FOLDER / "requests.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
