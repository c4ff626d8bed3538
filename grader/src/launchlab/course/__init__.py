"""Authoring: a chapter's source becomes a solution notebook, a release, and a recorded run."""
