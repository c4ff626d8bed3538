"""`launchlab lab` as started: a real JupyterLab, asked over HTTP."""

import json
import os
import subprocess
import sys

import lab_server
import pytest

from launchlab import paths


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(fetch, home): a function from a path below the server to (status, body), and the home folder that it was given."""
    home = tmp_path_factory.mktemp("home")
    with lab_server.running([sys.executable, "-m", "launchlab", "lab"], home) as lab:
        yield lab.fetch, home


def _settings(fetch, plugin: str, name: str):
    status, body = fetch(f"lab/api/settings/{plugin}")
    assert status == 200
    return json.loads(body)["schema"]["properties"][name]["default"]


def test_defaults_of_the_course_are_in_force(server):
    fetch, _ = server
    assert _settings(fetch, "@jupyterlab/translation-extension:plugin", "locale") == "zh_CN"
    assert _settings(fetch, "@jupyterlab/notebook-extension:tracker", "recordTiming") is True
    assert _settings(fetch, "@jupyterlab/apputils-extension:notification", "fetchNews") == "false"
    assert _settings(fetch, "jupyterlab-execute-time:settings", "enabled") is True


def test_chinese_is_installed(server):
    status, body = server[0]("lab/api/translations/zh_CN")
    assert status == 200
    assert json.loads(body)["data"]["jupyterlab"]["Notebook"] == ["笔记本"]


def test_it_opens_on_the_course_and_reaches_the_repository(server):
    fetch, _ = server
    status, body = fetch("lab")
    assert status == 200
    assert b'"preferredPath": "course"' in body
    names = {entry["name"] for entry in json.loads(fetch("api/contents/")[1])["content"]}
    assert {"course", "solutions", "grader"} <= names


def test_nbgraders_pages_work_from_the_course_configuration(server):
    fetch, _ = server
    status, body = fetch("formgrader/api/assignments")
    assert status == 200
    chapters = {each["name"]: each for each in json.loads(body)}
    assert chapters["03_cuda_graph_concepts"]["release_path"] == "course/03_cuda_graph_concepts"
    assert fetch("assignments/validate")[0] in (403, 405), "there, though not for GET"
    assert fetch("assignment_list")[0] == 404


def test_the_users_settings_stay_untouched(server):
    _, home = server
    assert not list(home.rglob("*.jupyterlab-settings"))
    assert not list(home.rglob("*.jupyterlab-workspace"))


def test_without_a_course_it_says_what_to_do(tmp_path):
    (tmp_path / "grader").mkdir()
    (tmp_path / "grader" / "chapters.toml").write_bytes((paths.GRADER / "chapters.toml").read_bytes())
    environment = {**os.environ, "LAUNCHLAB_ROOT": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", "launchlab", "lab"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "launchlab build" in ended.stderr
