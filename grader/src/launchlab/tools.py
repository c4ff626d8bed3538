"""The packages of grader/lock-tools.txt, which only some commands need: which of them are missing, and how to get them.

grader/launch installs them before such a command. One that was started otherwise (by an interpreter of its own, or as
plain nbgrader) asks here.
"""

from importlib.metadata import PackageNotFoundError, version

# By what they serve; as pyproject.toml has them, each use an extra or the group `dev`.
PACKAGES = {
    "site": ("babel", "docutils", "furo", "latex2mathml", "myst-nb", "sphinx"),
    "cluster": ("ray",),
    "postgresql": ("psycopg",),
    "dev": ("hypothesis", "playwright", "pytest", "pytest-xdist", "ruff", "typos"),
}
INSTALL = (
    "请在课程的文件夹里运行 ./grader/launch doctor --tools，它会把缺的装进 grader/.venv；"
    "用自己的 Python 时，请运行 python -m pip install --no-deps -r grader/lock-tools.txt。"
)


def versions(use: str) -> dict[str, str | None]:
    """Package -> installed version, None where it is missing, of the packages that serve ``use``."""
    found = {}
    for name in PACKAGES[use]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def missing(use: str) -> list[str]:
    """The packages that ``use`` needs and this interpreter lacks."""
    return [name for name, found in versions(use).items() if not found]
