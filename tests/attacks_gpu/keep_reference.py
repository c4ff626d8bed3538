# ruff: noqa
# The solution itself.
# loses: nothing
