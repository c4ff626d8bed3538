"""`python -m launchlab`: the command line, with a word for a package that is missing."""

import sys


def main() -> int:
    """Run the command line; return its exit status."""
    try:
        from launchlab.cli import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "launchlab":
            raise
        print(
            f"✗ 这个 Python（{sys.executable}）里没有包 {error.name}。"
            "请用 ./grader/launch 启动；若设置了 LAUNCHLAB_PYTHON，请换成装好全部包的解释器。\n"
            f"  (missing package: {error.name})",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
