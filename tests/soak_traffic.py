"""A thousand mixed requests for the reference solutions of four chapters, and what is right about each answer.

One function a chapter. It gets the chapter's names, as its cells (experiments and tests apart) left them, and a `Traffic`
that counts; it sends requests until the traffic has had enough, compares every output with the chapter's own yardstick on
the CPU, and returns counts of what happened inside. Shapes are hot or rare, inputs and buffers change all the time, so
that addresses come back under other shapes; what a service keeps is thrown away and made anew in between. Everything is
drawn from the operating system's entropy.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

REQUESTS, WARM, EVERY = 1000, 200, 100
RENEWED = 100  # after so many requests a service itself is thrown away and made anew, half way between two samples
PATTERN, NEIGHBOURS = 0x5A5A5A5A, (256, 2048, 8192, 32768)  # what neighbours hold, and how many numbers of 4 bytes
PATIENCE = 30.0  # seconds for an answer that comes by a future


class Traffic:
    """Counts requests, wrong answers and free device memory. ``names``: the chapter's.

    wrong: how many answers were not right; faults: the first few in words. memory: samples, from request WARM on and then
    every EVERY, of the device's free bytes (`cudaMemGetInfo`, after a device-wide wait) and of what CuPy's pool holds.
    """

    def __init__(self, requests: int, seconds: float):
        import cupy

        self.cupy, self.rng = cupy, np.random.default_rng()
        self.requests, self.deadline = requests, time.monotonic() + seconds
        self.served, self.wrong, self.faults, self.memory = 0, 0, [], []
        self.counts: Counter[str] = Counter()
        self.neighbours: list = []
        self._renewed = 0

    def more(self) -> bool:
        """Whether to go on. Called while nothing runs on the GPU: takes the samples of memory."""
        if self.served >= WARM and self.served // EVERY > (self.memory[-1]["served"] // EVERY if self.memory else 0):
            gc.collect()
            self.cupy.cuda.runtime.deviceSynchronize()
            free, _ = self.cupy.cuda.runtime.memGetInfo()
            self.memory.append({"served": self.served, "free": free, "pool": self.cupy.get_default_memory_pool().total_bytes()})
        return self.served < self.requests and time.monotonic() < self.deadline

    def renewal(self) -> bool:
        """Whether it is time to make the service anew: once for every RENEWED requests."""
        due = (self.served + RENEWED // 2) // RENEWED
        if due == self._renewed:
            return False
        self._renewed = due
        self.counts["renewed"] += 1
        return True

    def answer(self, right: bool, what: str) -> None:
        """One request was answered."""
        self.served += 1
        if not right:
            self.fault(what)

    def fault(self, what: str) -> None:
        self.wrong += 1
        if len(self.faults) < 8:
            self.faults.append(f"request {self.served}: {what}")

    def disturb(self, streams: list) -> None:
        """Let neighbours come and go: arrays that take whatever memory is free, and that nobody may write to."""
        if self.rng.random() < 0.5:
            return
        if len(self.neighbours) > 7 or (self.neighbours and self.rng.random() < 0.4):
            self._dismiss(self.neighbours.pop(int(self.rng.integers(len(self.neighbours)))))
        stream = streams[int(self.rng.integers(len(streams)))]
        with stream:
            array = self.cupy.full(int(self.rng.choice(NEIGHBOURS)), PATTERN, self.cupy.uint32)
        stream.synchronize()
        self.neighbours.append((stream, array))

    def leave(self) -> None:
        """The neighbours that are left go, too."""
        while self.neighbours:
            self._dismiss(self.neighbours.pop())

    def _dismiss(self, neighbour: tuple) -> None:
        stream, array = neighbour
        self.counts["neighbours"] += 1
        with stream:
            spoilt = int((array != PATTERN).sum())
        if spoilt:
            self.fault(f"{spoilt} of {array.size} numbers of somebody else's array were overwritten")

    def whole(self, rng: np.random.Generator, *shape: int, high: int = 9) -> np.ndarray:
        """Whole numbers, -8 … high - 1, float32."""
        return rng.integers(-8, high, shape).astype(np.float32)

    def hot_or_rare(self, hot: list[int], least: int, most: int) -> int:
        """A size: mostly one of the hot ones, else any."""
        return int(self.rng.choice(hot)) if self.rng.random() < 0.7 else int(self.rng.integers(least, most + 1))


def graph_per_shape(ns: dict, traffic: Traffic) -> dict[str, int]:
    """Chapter 18: the LRU cache of graphs, under two engines and two profiles, in turn with the service that pads to buckets."""
    cp, rng, stream = traffic.cupy, traffic.rng, ns["stream"]
    engines = {"chat": ns["engine"], "other": ns["load"](ns["make_plan"]("other"))}
    hot = [int(n) for n in rng.integers(12, 60, 3)] + [int(rng.integers(100, 500))]
    places: dict[int, tuple] = {}
    totals: Counter[str] = Counter()

    def place(number: int) -> tuple:
        """Buffers of a place, which stay for a while; then their memory may come back under another shape."""
        if number not in places or rng.random() < 0.08:
            places.pop(number, None)
            length = traffic.hot_or_rare([n - int(rng.integers(2)) for n in hot], 8, 512)
            with stream:
                buffers = (
                    cp.empty((length, 64), cp.float32),
                    cp.empty((length, 1), cp.float32),
                    cp.empty((length, 64), cp.float32),
                )
            places[number] = (str(rng.choice(list(engines))), int(rng.integers(2)) if length <= 64 else 1, buffers)
        return places[number]

    def cached(cache) -> None:
        model, profile, (x, mask, y) = place(int(min(rng.geometric(0.3), 12)))
        host, kept = traffic.whole(rng, *x.shape), rng.integers(0, 2, mask.shape).astype(np.float32)
        with stream:
            x.set(host)
            mask.set(kept)
            y.fill(99)
        cache.run(engines[model], profile, x, mask, y)
        stream.synchronize()
        right = np.array_equal(y.get(), ns["expected"](host, kept, model))
        traffic.answer(right, f"GraphCache, {model}, profile {profile}, length {len(host)}")

    def renewed() -> tuple:
        with stream:
            table = cp.zeros((ns["SLOTS"], 64), cp.float32)
        buckets = sorted({int(n) for n in rng.choice(np.arange(16, 300), 4, replace=False)})
        stream.synchronize()
        return ns["GraphCache"](6), ns["PaddedServer"](table, buckets), table, np.zeros(table.shape, np.float32)

    def note(cache, server) -> None:
        totals.update(cache.counters)
        totals["padded fallbacks"] += server.fallbacks

    cache, server, table, want = renewed()
    while traffic.more():
        if traffic.renewal():
            note(cache, server)
            del cache, server, table
            gc.collect()
            cache, server, table, want = renewed()
        traffic.disturb([stream])
        if rng.random() < 0.65:
            cached(cache)
            continue
        length = traffic.hot_or_rare(hot, 8, 512)
        host, slots = traffic.whole(rng, length, 64), rng.permutation(ns["SLOTS"])[:length].astype(np.int32)
        with stream:
            server.infer(cp.asarray(host), cp.asarray(slots))
        stream.synchronize()
        want = ns["served"](want, host, slots)
        traffic.answer(np.array_equal(table.get(), want), f"PaddedServer, length {length}, buckets {server.buckets}")
    note(cache, server)
    totals["fallbacks"] += totals.pop("padded fallbacks")
    return dict(totals)


def multi_stream(ns: dict, traffic: Traffic) -> dict[str, int]:
    """Chapter 20: the pool, asked by four threads at once, while ensembles step beside it; ensembles and pools come and go."""
    cp, rng, depth = traffic.cupy, traffic.rng, 4
    towers = {first: ns["load"](ns["tower_plan"](depth, first)) for first in (0, 50)}
    writers = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    branches = (1, 3, 5, 8)  # of the ensemble in each place: what they take together stays the same
    ensembles: dict[int, list] = {}

    def client(pool, first: int, writer, own: np.random.Generator, found: list) -> None:
        waiting = []
        try:
            for _ in range(8):
                data = traffic.whole(own, int(own.choice([1, 4, 16])) if own.random() < 0.7 else int(own.integers(1, 17)), 64)
                ready = cp.cuda.Event(disable_timing=True)
                with writer:
                    source, x = cp.asarray(data), cp.full(data.shape, 99, cp.float32)
                    if own.random() < 0.3:
                        ns["launch_spin"](writer, 300)
                    ns["launch_refill"](writer, x, source)
                    ready.record(writer)
                waiting.append((data, source, x, pool.submit(x, ready)))
            for data, _, _, future in waiting:
                right = np.array_equal(future.result(timeout=PATIENCE), ns["inferred"](data, depth, first))
                found.append((right, f"pool, {len(data)} rows"))
        except Exception as error:  # noqa: BLE001 - told with the results
            found += [(False, f"pool: {type(error).__name__}: {error}")] * (8 - len(found))

    def replaced(place: int) -> list:
        ensembles.pop(place, None)  # nothing of it runs: the last step was waited for
        firsts = [int(first) for first in rng.choice([0, 50], branches[place])]
        data = traffic.whole(rng, len(firsts), int(rng.integers(1, 17)), 64, high=8)
        with ns["stream"]:
            x = cp.asarray(data)
        ns["stream"].synchronize()
        traffic.counts["ensembles"] += 1
        return [ns["make_ensemble"]([towers[first] for first in firsts], x), x, data, firsts]

    def step(place: int) -> None:
        ensemble, x, data, firsts = ensembles[place]
        if rng.random() < 0.3:
            data = traffic.whole(rng, *data.shape, high=8)
            x.set(data, stream=ns["stream"])
        times = int(rng.integers(1, 4))
        for _ in range(times):
            ensemble()
        ns["stream"].synchronize()
        ensembles[place][2] = ns["stepped"](data, depth, firsts, times)
        right = np.array_equal(x.get(stream=ns["stream"]), ensembles[place][2])
        traffic.answer(right, f"ensemble of {len(firsts)}, {data.shape[1]} rows, {times} steps")

    def pooled() -> tuple:
        first = int(rng.choice(list(towers)))
        return ns["make_pool"](towers[first], 4), first

    pool, first = pooled()
    for place in range(4):
        ensembles[place] = replaced(place)
    try:
        while traffic.more():
            if traffic.renewal():
                pool.close()
                del pool
                gc.collect()
                pool, first = pooled()
            if rng.random() < 0.7:
                place = int(rng.integers(4))
                ensembles[place] = replaced(place)
            for _ in range(8):
                traffic.disturb([*writers, ns["stream"]])
            found: list[list] = [[] for _ in writers]
            clients = [
                threading.Thread(target=client, args=(pool, first, writer, np.random.default_rng(), results))
                for writer, results in zip(writers, found, strict=True)
            ]
            for each in clients:
                each.start()
            for _ in range(8):
                step(int(rng.integers(4)))
            for each in clients:
                each.join()
            for result in (result for results in found for result in results):
                traffic.answer(*result)
                traffic.counts["pooled"] += 1
    finally:
        pool.close()
    return {}


def context_memory(ns: dict, traffic: Traffic) -> dict[str, int]:
    """Chapter 21: one block of scratch for two engines and all graphs, on three streams at once, without waiting in between."""
    cp, rng, stream, lanes = traffic.cupy, traffic.rng, ns["stream"], ns["lanes"]
    engines, widths, block = ns["engines"], ns["WIDTHS"], ns["Block"]
    hot = [int(n) for n in rng.integers(1, 100, 3)] + [256]

    def pair(rows: int) -> tuple:
        with stream:
            arrays = cp.zeros((rows, 64), cp.float32), cp.empty((rows, 64), cp.float32)
        stream.synchronize()
        return arrays

    def captured(desk, which: int) -> list:
        x, y = pair(traffic.hot_or_rare(hot, 1, 256))
        traffic.counts["captures"] += 1
        return [desk.capture(which, x, y), which, x, y]

    def renewed() -> tuple:
        """A desk with four graphs, three more from `capture_all`, and a service of contexts kept ready."""
        desk = ns["make_desk"](engines, block)
        replays = [captured(desk, number % 2) for number in range(4)]
        asked = [(number % 2, *pair(traffic.hot_or_rare(hot, 1, 256))) for number in range(3)]
        replays += [[graph, *request] for graph, request in zip(ns["capture_all"](engines, asked, block), asked, strict=True)]
        traffic.counts["captures"] += 3
        sizes = [int(n) for n in rng.choice(np.arange(1, 257), 3, replace=False)]
        return desk, replays, ns["make_ready"](engines[0], sizes, block), sizes

    def submit(wave: list) -> None:
        """One request, not waited for: its outputs and what is to be in them go to the wave."""
        kind = rng.random()
        if kind < 0.5:
            which, rows, lane = int(rng.integers(2)), traffic.hot_or_rare(hot, 1, 256), lanes[int(rng.integers(3))]
            host = traffic.whole(rng, rows, 64)
            with lane:
                x, y = cp.asarray(host), cp.full(host.shape, 99, cp.float32)
            desk.infer(which, x, y, lane)
            wave.append((f"desk.infer, engine {which}, {rows} rows", x, [(y, ns["expected"](host, widths[which]))]))
        elif kind < 0.9:
            number = int(rng.integers(len(replays)))
            graph, which, x, y = replays[number]
            lane, host = lanes[number % 3], traffic.whole(rng, *x.shape)  # one graph, one stream: its buffers are in turn there
            with lane:
                x.set(host)
                y.fill(99)
            graph.launch(lane)
            with lane:
                wave.append(
                    (
                        f"replay {number}, engine {which}, {len(host)} rows",
                        None,
                        [(y.copy(), ns["expected"](host, widths[which]))],
                    )
                )
        else:
            host = traffic.whole(rng, sizes[int(rng.integers(3))], 64)
            with stream:
                x, y = cp.asarray(host), cp.full(host.shape, 99, cp.float32)
            ready.serve(x, y)
            once = ns["expected"](host, widths[0])
            wave.append((f"ready.serve, {len(host)} rows", None, [(y, once), (x, ns["expected"](once, widths[0]))]))

    desk, replays, ready, sizes = renewed()
    while traffic.more():
        if traffic.renewal():
            del desk, replays, ready
            gc.collect()
            desk, replays, ready, sizes = renewed()
        elif rng.random() < 0.4:
            number = int(rng.integers(4))
            replays[number] = captured(desk, replays[number][1])
            traffic.counts["evictions"] += 1
        for _ in range(4):
            traffic.disturb([*lanes, stream])
        wave: list[tuple] = []
        for _ in range(10):
            submit(wave)
        cp.cuda.runtime.deviceSynchronize()
        for what, _, outputs in wave:
            traffic.answer(all(np.array_equal(got.get(), want) for got, want in outputs), what)
    return {}


def ocr_pipeline(ns: dict, traffic: Traffic) -> dict[str, int]:
    """Chapter 24: two readers with different buckets, on pictures and crops of pictures that ONNX Runtime has read before."""
    rng, stream = traffic.rng, ns["stream"]
    engine, characters = ns["load_engine"](ns["make_plan"]()), ns["character_list"]()
    buckets = {"own": list(ns["BUCKETS"]), "other": sorted(8 * int(n) for n in (rng.integers(13, 38), rng.integers(50, 81)))}

    def crop(image: np.ndarray) -> np.ndarray:
        """Some rows and columns off, as a detector's boxes cut them."""
        if rng.random() < 0.3:
            return image
        (top, bottom), width = rng.integers(0, 3, 2), image.shape[1]
        left, right = int(rng.integers(0, width // 3 + 1)), int(rng.integers(2 * width // 3, width + 1))
        return np.ascontiguousarray(image[top : len(image) - bottom, left:right])

    def fair(name: str, wanted: int, seconds: float) -> list[tuple]:
        """Pictures with the right answers: only those in which ONNX Runtime is sure of every step."""
        found, until = [], time.monotonic() + seconds
        while len(found) < wanted and (time.monotonic() < until or len(found) < 6):
            image = crop(ns["unseen"](int(rng.integers(2**40)))[1])
            text, confidence, margin = ns["ort_answer"](image, buckets[name])
            if margin > 0.02 and text.strip():
                found.append((image, text, confidence))
        return found

    pictures = {"own": fair("own", 60, 8.0), "other": fair("other", 20, 4.0)}
    traffic.counts["pictures"] = sum(map(len, pictures.values()))
    readers = {name: ns["make_reader"](engine, characters, buckets[name]) for name in buckets}
    while traffic.more():
        if traffic.renewal():
            name = str(rng.choice(list(readers)))
            del readers[name]
            gc.collect()
            readers[name] = ns["make_reader"](engine, characters, buckets[name])
        traffic.disturb([stream])
        name = "own" if rng.random() < 0.75 else "other"
        choice = pictures[name]
        image, text, confidence = choice[int(rng.integers(min(6, len(choice)) if rng.random() < 0.5 else len(choice)))]
        got, sure = readers[name].read(image)
        traffic.answer(
            got == text and abs(sure - confidence) <= 2e-3,
            f"{name} reader, {image.shape}: {got!r} {sure:.4f}, not {text!r} {confidence:.4f}",
        )
    return {}


CHAPTERS: dict[str, Callable[[dict, Traffic], dict[str, int]]] = {
    "18_graph_per_shape": graph_per_shape,
    "20_multi_stream": multi_stream,
    "21_context_memory": context_memory,
    "24_ocr_pipeline": ocr_pipeline,
}
