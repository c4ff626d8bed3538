"""The page on large classes says what the records say."""

import json

import pytest
import scaling


def test_the_page_has_the_figures_of_the_records():
    text = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.updated(text) == text, "grader/SCALING.md: run python3 tests/scaling.py"


def test_the_figures_follow_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RECORDS", tmp_path)
    assert scaling.figures().count("not measured yet") == 4
    exams = [{"seconds": seconds} for seconds in (15.0, 4.0, 6.0)]
    one = {"gpus": 1, "exams": exams, "warm_a_minute": 12.0, "seconds": 40.0}
    cluster = {"gpu": "A", "cores": 9, "students": 3, "chapter": "c", "classes": [one, one | {"gpus": 2, "warm_a_minute": 23.0}], "speedup": {"warm_a_minute": 1.92}, "marks_equal": True}
    book = {"students": 10, "cores": 9, "seconds_each": 0.5, "seconds_each_of_tenths": [0.4, 0.6], "kept_bytes_each": 1000, "gradebook_bytes": 5000, "peak_memory_mib": 100}
    runs = [("sealed", 1, 5.0), ("sealed", 3, 7.0), ("plain", 1, 4.0), ("plain", 3, 10.0)]
    cost = {"gpu": None, "cores": 2, "runs": [{"chapter": "c", "grader": grader, "students": students, "seconds": seconds} for grader, students, seconds in runs]}
    solutions = {"gpu": "A", "gpus": 2, "seconds": 350.4, "chapters": [{"seconds": seconds} for seconds in (5.0, 20.0, 83.3)]}
    for name, record in {"gpu_solutions": solutions, "gpu_cluster": cluster, "gradebook_cost": book, "cpu_cost": cost}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    text = scaling.figures()
    assert "| 1 | 13.9 h | the exams |" in text  # 10,000 × 5 s
    assert "| 16 | 1.4 h | the gradebook |" in text  # 10,000 × 0.5 s
    assert "each of the 3 chapters, each reference started anew (2 A) | 350 s in all; a chapter 5 to 83 s, in the middle 20 s |" in text
    assert "| c, a further submission | 1.0 s | 3.0 s |" in text
    assert "Beyond 10 GPUs" in text and "(7,200 submissions an hour)" in text


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="markers"):
        scaling.updated("nothing here")
