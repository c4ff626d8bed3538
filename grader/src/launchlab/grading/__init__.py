"""The nbgrader plug-ins: intake of submissions, the sealed exam, verdicts, and feedback."""

# How to say, on nbgrader's command line, that a class is to be graded also where there is no sandbox (see `intake`).
WITHOUT_SANDBOX = "--IntakeExporter.no_sandbox=True"
