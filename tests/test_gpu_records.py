"""What was run on a GPU before, looked at again without one: all solutions, a soak of four services, mistakes that must fail."""

import ast
import json
from pathlib import Path

import attack_files
import gpu_mutants
import gpu_soak
import gpu_solutions
import nbformat
import pytest
from earlier_run import earlier
from soak_traffic import CHAPTERS, EVERY, REQUESTS, WARM

import launchlab
from launchlab.manifest import chapter, chapters

PACKAGE = Path(launchlab.__file__).parent
RECORDS = Path(__file__).parent / "records"
MUTANTS = gpu_mutants.mutants()


def recorded(name: str) -> dict:
    """A record, or a skip that says what to run where there is none yet."""
    path = RECORDS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"not run: needs a GPU: python3 tests/{name}.py tests/records/{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_all_solutions_were_graded_in_one_go():
    assert gpu_solutions.problems(recorded("gpu_solutions")) == []


def test_a_run_goes_on_where_an_earlier_one_left_it_on_the_same_machine(tmp_path):
    out = tmp_path / "out.json"
    assert earlier(out, {"gpu": "A"}) == {}
    told = [{"chapter": "a", "score": 12, "max": 12}, {"chapter": "b", "score": 11, "max": 12}, {"chapter": "c", "error": "E"}]
    out.write_text(json.dumps({"gpu": "A", "seconds": 5.0, "chapters": told}), encoding="utf-8")
    assert gpu_solutions.with_full_marks(earlier(out, {"gpu": "A"})) == {"gpu": "A", "seconds": 5.0, "chapters": told[:1]}
    with pytest.raises(SystemExit, match="another machine"):
        earlier(out, {"gpu": "B"})


@pytest.mark.parametrize(("words", "spoil"), [
    ("no seconds", lambda record: record.pop("seconds")),
    ("03_cuda_graph_concepts: not graded", lambda record: record["chapters"].pop(2)),
    ("03_cuda_graph_concepts: 11 of 12", lambda record: record["chapters"][2].update(score=11)),
    ("03_cuda_graph_concepts: 7 of 7", lambda record: record["chapters"][2].update(score=7, max=7)),
    ("03_cuda_graph_concepts: it broke", lambda record: record["chapters"][2].update(error="it broke")),
])
def test_solutions_with_a_shortcoming_are_refused(words, spoil):
    record = {"gpu": "G", "driver": "1", "date": "2026-01-01", "versions": {"cupy": "1"}, "seconds": 1.0}
    record["chapters"] = [{"chapter": each.name, "score": each.points, "max": each.points} for each in chapters()]
    assert gpu_solutions.problems(record) == []
    spoil(record)
    assert gpu_solutions.problems(record) == [words]


def test_soak_shows_a_thousand_right_answers_each_and_flat_memory():
    assert gpu_soak.problems(recorded("gpu_soak")) == []


def made_up() -> dict:
    """A soak's record with nothing wrong in it."""
    samples = [{"served": served, "free": 10**11, "pool": 10**6} for served in range(WARM, REQUESTS + 1, EVERY)]
    told = {"requests": REQUESTS, "wrong": 0, "faults": [], "memory": samples, "grown": 0}
    chapters = {
        name: told | {"counts": dict.fromkeys((*gpu_soak.LEAST[name], "renewed", "neighbours"), 1)} for name in CHAPTERS
    }
    record = {"gpu": "G", "driver": "1", "date": "2026-01-01", "versions": {"cupy": "1"}, "chapters": chapters}
    return json.loads(json.dumps(record))  # nothing in it stands in two places


FIRST = next(iter(CHAPTERS))
SHORTCOMINGS = {
    "no gpu": lambda record: record.pop("gpu"),
    f"{FIRST}: no record": lambda record: record["chapters"].pop(FIRST),
    f"{FIRST}: the process ended": lambda record: record["chapters"].update({FIRST: {"error": "the process ended with -9"}}),
    f"{FIRST}: only 999 requests": lambda record: record["chapters"][FIRST].update(requests=999),
    f"{FIRST}: 1 wrong": lambda record: record["chapters"][FIRST].update(wrong=1),
    f"{FIRST}: no evictions": lambda record: record["chapters"][FIRST]["counts"].update(evictions=0),
    f"{FIRST}: memory was looked at": lambda record: record["chapters"][FIRST]["memory"].pop(3),
    f"{FIRST}: grown is 0": lambda record: record["chapters"][FIRST]["memory"][4].update(free=9),
    f"{FIRST}: 17.0 MiB more": lambda record: (
        record["chapters"][FIRST].update(grown=17 << 20),
        record["chapters"][FIRST]["memory"][-1].update(free=10**11 - (17 << 20)),
    ),
}


@pytest.mark.parametrize("words", SHORTCOMINGS)
def test_soak_with_a_shortcoming_is_refused(words):
    record = made_up()
    assert gpu_soak.problems(record) == []
    SHORTCOMINGS[words](record)
    (problem,) = gpu_soak.problems(record)
    assert problem.startswith(words)


def test_every_mistake_failed_its_exercise_for_a_reason_of_its_own():
    record = recorded("gpu_mutants")
    cases = {case["name"]: case for case in record["cases"]}
    assert record["gpu"] and record["driver"] and record["versions"] and record["date"]
    assert record["not_reached"] == [] and list(cases) == [mutant.name for mutant in MUTANTS]
    for mutant in MUTANTS:
        case = cases[mutant.name]
        assert [case["about"], case["loses"], case["keeps"], case["says"]] == [
            mutant.about,
            [*mutant.loses],
            [*mutant.keeps],
            mutant.says,
        ]
        assert gpu_mutants.problems(case, record["cases"]) == [], mutant.name


def test_the_kinds_of_mistakes_are_all_there():
    told = " ".join(mutant.about for mutant in MUTANTS)
    kinds = (
        "stale graph",
        "eviction that keeps the dead",
        "Ignores a False",
        "Shares device memory between overlapping contexts",
        "Forgets the event between producer and consumer",
    )
    assert [kind for kind in kinds if kind not in told] == []
    assert {"10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "20", "21", "22", "23", "24", "25", "26", "27", "28", "29", "30"} == {mutant.name[:2] for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistake_is_the_answer_with_something_wrong(mutant):
    """It still takes the place of one answer, tells what it expects, and is no longer that answer."""
    solution = nbformat.read(chapter(gpu_mutants.chapter_of(mutant)).solution, as_version=4)
    ((place, name, code),) = mutant.cells
    honest = {cell.id: cell.source for cell in attack_files.honest(solution, solution).cells}[f"solution-{name}"]
    assert place == "solution" and mutant.loses and mutant.says
    assert ast.dump(ast.parse(code)) != ast.dump(ast.parse(honest))
    wrong, right = ({each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef | ast.ClassDef)} for text in (code, honest))
    assert wrong & right
    nb = gpu_mutants.notebook(mutant, solution)
    assert [cell.source for cell in nb.cells if cell.id == f"solution-{name}"] == [code]
    graded = {cell.metadata.nbgrader.grade_id for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade")}
    assert graded == {f"test_{each}" for each in (*mutant.loses, *mutant.keeps)}
    tests = [cell.source for cell in solution.cells if cell.id in {f"test-{each}" for each in mutant.loses}]
    examiner = [(PACKAGE / "exam" / f"{module}.py").read_text(encoding="utf-8") for module in ("check", "examine")]
    assert any(mutant.says in text for text in (*tests, *examiner))
