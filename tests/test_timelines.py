"""Chapter 25's answers about its shipped recordings agree with nsys's own reports of the same files (timelines/nsys.json)."""

import json
import sqlite3
from contextlib import closing

import pytest

from launchlab.course import source
from launchlab.manifest import chapter

CHAPTER = chapter("25_nsight_timeline")
TIMELINES = CHAPTER.source.parent / "timelines"
NSYS = json.loads((TIMELINES / "nsys.json").read_text(encoding="utf-8"))
PROGRAMS = json.loads((TIMELINES / "about.json").read_text(encoding="utf-8"))["us_per_request"]["node"]
PHASES = {"launch": ("enqueue",), "capture": ("capture",), "host": ("decode", "prepare")}


@pytest.fixture(scope="module")
def solution():
    """The names that the chapter's given and solution cells define which need no GPU."""
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(CHAPTER.source.parent)
        for cell in source.parse(CHAPTER.source.read_text(encoding="utf-8")).cells:
            if cell.cell_type == "code" and not source.tags(cell) and not cell.id.startswith("test-"):
                exec(cell.source, names)
    return names


@pytest.fixture
def answers(solution, monkeypatch):
    """(summarize, diagnose) of a program's recording, by the chapter's solution."""

    def ask(program):
        monkeypatch.chdir(CHAPTER.source.parent)
        db = solution["opened"](program)
        return solution["summarize"](db, program), solution["diagnose"](db, program)

    return ask


def rows(program, query):
    with closing(sqlite3.connect(TIMELINES / f"{program}.sqlite")) as db:
        return db.execute(query).fetchall()


def projection(program):
    """nsys's row for the whole program: how long its range and what it made the GPU do took, ns."""
    return next(row for row in NSYS[program]["nvtx_gpu_proj_sum"] if row["Range"] == program)


def total(program, report):
    return sum(row["Total Time (ns)"] for row in NSYS[program][report])


def idle(program):
    """When the GPU had neither a kernel nor a copy within the program's range: nsys's gaps, what came before and after; ns."""
    tables = [name for (name,) in rows(program, "SELECT name FROM sqlite_master WHERE name LIKE 'CUPTI_ACTIVITY_KIND_MEM%'")]
    work = " UNION ALL ".join(f"SELECT start, end FROM {table}" for table in ("CUPTI_ACTIVITY_KIND_KERNEL", *tables))
    ((first, last),) = rows(program, f"SELECT min(start), max(end) FROM ({work})")
    ((begin, end),) = rows(program, f"SELECT start, end FROM NVTX_EVENTS WHERE text = '{program}'")
    return [(begin, first), *((start, start + ns) for start, ns in NSYS[program]["gpu_gaps"]), (last, end)]


def shared(intervals, others):
    """How long both last together, µs; neither list overlaps itself."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in intervals for c, d in others) / 1e3


@pytest.mark.parametrize("program", PROGRAMS)
def test_six_numbers_are_those_of_nsys(program, answers):
    found, _ = answers(program)
    calls = {row["Name"]: row for row in NSYS[program]["cuda_api_sum"] if "Launch" in row["Name"]}
    if rows(program, "SELECT 1 FROM NVTX_EVENTS WHERE text = 'capture'"):
        calls = {name: row for name, row in calls.items() if "Graph" in name}  # the others were captured and launched nothing
    gaps = [ns for _, ns in NSYS[program]["gpu_gaps"]]
    assert found == {
        "kernels": sum(row["Instances"] for row in NSYS[program]["cuda_gpu_kern_sum"]),
        "launches": sum(row["Num Calls"] for row in calls.values()),
        "launch_share": pytest.approx(
            sum(row["Total Time (ns)"] for row in calls.values()) / projection(program)["Total Range Time (ns)"]
        ),
        "span_us": pytest.approx(projection(program)["Total Proj Time (ns)"] / 1e3),
        "gaps": sum(ns >= 5000 for ns in gaps),
        "longest_gap_us": pytest.approx(max(gaps) / 1e3),
    }


@pytest.mark.parametrize("program", PROGRAMS)
def test_verdict_is_what_the_reports_of_nsys_lead_to(program, answers):
    _, found = answers(program)
    whole = projection(program)["Total Range Time (ns)"]
    at_work = projection(program)["Total Proj Time (ns)"] - sum(ns for _, ns in NSYS[program]["gpu_gaps"])
    kernels, copies = total(program, "cuda_gpu_kern_sum"), total(program, "cuda_gpu_mem_time_sum")
    if not copies:  # kernels may overlap: nsys's sum of them can exceed the time that any of them ran
        kernels = at_work
    assert kernels + copies == at_work, "kernels and copies overlap: the reports of nsys alone do not tell the busy time"
    gaps = idle(program)
    marks = rows(program, "SELECT text, start, end FROM NVTX_EVENTS")
    expected = {"copy": copies / 1e3} | {
        cause: shared(gaps, [(start, end) for text, start, end in marks if text in names]) for cause, names in PHASES.items()
    }
    expected["wait"] = (whole - at_work) / 1e3 - sum(expected[cause] for cause in PHASES)
    assert found["idle_us"] == pytest.approx(expected)
    assert found["busy"] == pytest.approx(kernels / whole)
    assert found["cause"] == ("gpu" if kernels >= 0.8 * whole else max(expected, key=expected.get))
