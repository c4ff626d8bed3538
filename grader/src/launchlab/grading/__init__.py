"""The nbgrader plug-ins: intake of submissions, the sealed exam, verdicts, and feedback."""
