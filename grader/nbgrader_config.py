"""nbgrader's configuration. Run every ``nbgrader …`` command from this folder.

All folders hang off the root of the course: ``solutions/`` and ``course/`` are committed, and
whatever grading makes goes to ``build/``. The environment variable LAUNCHLAB_ROOT points all of
it at another course (the tests do that), LAUNCHLAB_BUILD at another place for what grading makes.
"""

import os
import sys

from nbconvert.preprocessors import ClearMetadataPreprocessor, CSSHTMLHeaderPreprocessor, TagRemovePreprocessor
from nbgrader import preprocessors as steps

from launchlab import tools
from launchlab.course.stubs import StubSolutions
from launchlab.paths import BUILD, ROOT

c = get_config()  # noqa: F821 (nbgrader puts it there)

# nbgrader starts alembic by name to make its gradebook: found also where the environment is not activated.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

# --- the course -----------------------------------------------------------------------------
BUILD.mkdir(parents=True, exist_ok=True)
c.NbGrader.logfile = str(BUILD / "nbgrader.log")
c.CourseDirectory.course_id = "launchlab"
c.CourseDirectory.root = str(ROOT)
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "course"
c.CourseDirectory.submitted_directory = str(BUILD / "submitted")
c.CourseDirectory.autograded_directory = str(BUILD / "autograded")
c.CourseDirectory.feedback_directory = str(BUILD / "feedback")
# A file, or what LAUNCHLAB_GRADEBOOK names: postgresql://… for graders on several machines.
c.CourseDirectory.db_url = os.environ.get("LAUNCHLAB_GRADEBOOK") or f"sqlite:///{BUILD / 'gradebook.db'}"
if c.CourseDirectory.db_url.startswith("postgres") and tools.missing("postgresql"):  # else each command ends in a traceback
    sys.exit(f"✗ 成绩册在 PostgreSQL 上（LAUNCHLAB_GRADEBOOK），而这个 Python 里没有它的驱动 psycopg。{tools.INSTALL}")
# Replaces nbgrader's list, so its four entries are repeated; the rest must not reach a release.
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "*.py", ".*"]

# --- solution notebook -> release -------------------------------------------------------------
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_cell_tags = {"instructor"}
c.LockCells.lock_readonly_cells = False  # learners may play with the given cells
c.GenerateAssignment.preprocessors = [
    TagRemovePreprocessor,
    steps.LockCells,
    StubSolutions,
    steps.ClearOutput,
    steps.CheckCellMetadata,
    steps.ComputeChecksums,
    steps.SaveCells,  # into the gradebook, hidden tests included
    steps.ClearHiddenTests,
    steps.ComputeChecksums,
    steps.CheckCellMetadata,
]

# --- submission -> marks: the plug-ins of launchlab.grading -----------------------------------
c.Autograde.exporter_class = "launchlab.grading.intake.IntakeExporter"
c.Autograde.post_convert_hook = "launchlab.grading.outcome.settled"
c.Autograde.sanitize_preprocessors = [
    steps.ClearOutput,
    steps.DeduplicateIds,
    steps.OverwriteKernelspec,
    steps.OverwriteCells,
    steps.CheckCellMetadata,
]
c.Autograde.autograde_preprocessors = [
    "launchlab.grading.sealed.SealedExecute",  # in place of Execute
    ClearMetadataPreprocessor,
    steps.LimitOutput,
    "launchlab.grading.save.SaveVerdicts",  # in place of SaveAutoGrades
    steps.AssignLatePenalties,
    steps.CheckCellMetadata,
]

# --- marks -> feedback ------------------------------------------------------------------------
c.GenerateFeedback.preprocessors = [
    "launchlab.grading.feedback.RedactHidden",
    steps.GetGrades,
    CSSHTMLHeaderPreprocessor,
]

# --- marks -> a table -------------------------------------------------------------------------
c.ExportApp.plugin_class = "launchlab.grading.marks.MarksExport"
