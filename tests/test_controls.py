"""The cheats are real: tests that share the learner's process are beaten by those that say so."""

import shutil
from pathlib import Path

import attack_files
import pytest
from course_copy import NAME, Course, once
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parent / "attacks"
FOOLS = [attack for attack in attack_files.load(FOLDER) if attack.fools]


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    return Course(once(tmp_path_factory, "controls", Course.make))


def failed_tests(attack: attack_files.Attack, course: Course, folder: Path) -> set[str]:
    """Exercises whose tests, hidden ones and all, fail in the learner's own kernel: as plain nbgrader runs them."""
    solution = course.solution
    nb = attack_files.submission(attack, solution, course.release)
    tests = {cell.id: cell.source for cell in solution.cells if cell.id.startswith("test-")}
    for cell in nb.cells:
        cell.source = tests.get(cell.id, cell.source)
    nb.cells = [cell for cell in nb.cells if "gpu" not in cell.metadata.get("tags", [])]
    folder.mkdir(parents=True)
    shutil.copy(course.source.with_name("samples.csv"), folder)
    client = NotebookClient(
        nb, timeout=60, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/k"}),
    )  # fmt: skip
    client.execute()
    return {cell.id.removeprefix("test-") for cell in nb.cells if cell.id in tests and any(output.output_type == "error" for output in cell.outputs)}


def test_there_are_such_cheats():
    assert {attack.fools for attack in FOOLS} == {"open", "files"} and len(FOOLS) >= 6


@pytest.mark.parametrize("attack", FOOLS, ids=str)
def test_a_shared_process_is_fooled(attack, course, tmp_path):
    # As nbgrader places it: below the root of the course, where the files are.
    folder = course.build / "autograded" / attack.name / NAME if attack.fools == "files" else tmp_path / "work"
    assert not failed_tests(attack, course, folder) & set(attack.loses)


def test_an_honest_mistake_is_seen_there_too(course, tmp_path):
    """Control of the control: without a trick a wrong answer fails. (In open mode the reference is the learner's own.)"""
    attack = attack_files.parse(FOLDER / "answers_shown_tests_only.txt")
    assert "total_us" in failed_tests(attack, course, tmp_path / "work")
