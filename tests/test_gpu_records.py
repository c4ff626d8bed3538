"""What was run on a GPU before, looked at again without one: all solutions, a soak of four services, mistakes that must fail."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import attack_files
import gpu_attacks
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
ATTACKS = attack_files.load(gpu_attacks.FOLDER)
MUTANTS = gpu_mutants.mutants()
# What did not end as due on the GPU, and why. Strike out what does, once it has been examined again.
OPEN = {
    "30_capstone.answers_by_shape": "service_p99 was passed once: an answer kept by shape is not always found out",
    "17_capture_engine.steps_beside_the_graph": "the reason is the one that 30_capstone.answers_by_shape gets, too",
}


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


def case_of(name: str, attack: attack_files.Attack, fingerprint: str) -> dict:
    """What is on record of an exam of an attack as it is now; a skip that says what to run where there is nothing."""
    found = [case for case in recorded(name)["cases"] if case["name"] == attack.name and case["of"] == fingerprint]
    if not found:
        pytest.skip(f"not run: needs a GPU: python3 tests/{name}.py tests/records/{name}.json {attack.name}")
    (case,) = found
    return case


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_ended_as_due(attack):
    case = case_of("gpu_attacks", attack, gpu_attacks.fingerprint(attack))
    assert gpu_attacks.ended_as_due(attack, case) == (attack.name not in OPEN), case["checks"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistake_failed_its_exercise_for_a_reason_of_its_own(mutant):
    case = gpu_mutants.told(case_of("gpu_mutants", mutant, gpu_mutants.fingerprint(mutant)), mutant)
    others = [each for each in recorded("gpu_mutants")["cases"] if each["name"] != mutant.name]
    assert (gpu_mutants.problems(case, [case, *others]) == []) == (mutant.name not in OPEN)


def test_what_is_open_is_still_there():
    assert OPEN.keys() <= {each.name for each in (*ATTACKS, *MUTANTS)}


@pytest.mark.parametrize("name", ["gpu_attacks", "gpu_mutants"])
def test_record_tells_where_it_was_made(name):
    record = recorded(name)
    assert record["gpu"] and record["driver"] and all(case["date"] for case in record["cases"])


def changed(attack: attack_files.Attack, how: str) -> tuple:
    """What `attack_files.fingerprint` is asked when something of an exam has changed."""
    asked = gpu_attacks.asked(attack)
    match how:
        case "answer":
            return replace(attack, cells=[*attack.cells, ("after", "advance", "x = 1")]), gpu_attacks.chapter_of(attack), asked
        case "file":
            return replace(attack, files={"numpy.py": ""}), gpu_attacks.chapter_of(attack), asked
        case "chapter":
            return attack, chapter("05_stream_capture"), asked
    return attack, gpu_attacks.chapter_of(attack), list(asked)[:-1]


@pytest.mark.parametrize("how", ["answer", "file", "chapter", "tests"])
def test_what_has_changed_is_to_be_examined_again(how):
    attack = next(each for each in ATTACKS if not each.chapter)
    assert attack_files.fingerprint(*changed(attack, how)) != gpu_attacks.fingerprint(attack)
    assert gpu_attacks.fingerprint(replace(attack, about="told in other words", says="")) == gpu_attacks.fingerprint(attack)


def test_of_earlier_mistakes_only_those_that_failed_as_due_are_kept():
    first, second = MUTANTS[:2]
    cases = [gpu_mutants.told({"name": each.name, "of": gpu_mutants.fingerprint(each)}, each) for each in (first, second)]
    for case, mutant in zip(cases, (first, second), strict=True):
        case["checks"] = [{"id": f"test_{name}", "verdict": "failed", "score": 0, "points": 1, "reason": f"{mutant.says} {mutant.name}"} for name in mutant.loses]
        case["checks"] += [{"id": f"test_{name}", "verdict": "passed", "score": 1, "points": 1, "reason": ""} for name in mutant.keeps]
    assert gpu_mutants.as_due(cases) == cases
    assert gpu_mutants.as_due([cases[0] | {"of": "another text"}, cases[1]]) == cases[1:]
    cases[1]["checks"][0]["verdict"] = "passed"
    assert gpu_mutants.as_due(cases) == cases[:1]


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
    examiner = [(PACKAGE / "exam" / f"{module}.py").read_text(encoding="utf-8") for module in ("check", "examine", "kernel")]
    assert any(mutant.says in text for text in (*tests, *examiner))
