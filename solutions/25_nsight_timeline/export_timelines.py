"""Cut the recordings of record_timelines.py into the small exports of this chapter, and ask nsys about each.

    python export_timelines.py FOLDER [--nsys PATH/TO/nsys] [--placeholder]

FOLDER holds node.sqlite and whole.sqlite (`nsys export --type sqlite` of the recordings by node and by graph) and
plain.json, node.json and whole.json of the same runs. Written beside this file, into timelines/:

NAME.sqlite  one program each: the range of its name, the CUDA calls and ranges within, the GPU work that these calls
             started; times in ns from 10 µs before the range; nsys's own tables and columns, so `nsys stats` reads them.
             whole_graph.sqlite is `graph` recorded with --cuda-graph-trace=graph.
nsys.json    what `nsys stats` and `nsys analyze` say of each of these files; of the gaps start and duration, ns
about.json   GPU, driver, versions, date; µs per request without nsys and under it

Needs no GPU. --placeholder marks made-up data as such.
"""

import argparse
import json
import re
import sqlite3
import subprocess
import tempfile
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent / "timelines"
LEAD_NS = 10_000
WORK = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
NAMED = ("demangledName", "shortName", "mangledName", "nameId", "textId")  # columns that point into StringIds
ENUMS = ("ENUM_NSYS_EVENT_TYPE", "ENUM_NSYS_EVENT_CLASS", "ENUM_CUDA_MEMCPY_OPER", "ENUM_CUDA_MEM_KIND")
REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "nvtx_gpu_proj_sum")
GAPS = "gpu_gaps:gap=0:rows=-1"
WANTED_META = re.compile("EXPORT_PRODUCT_NAME|EXPORT_PRODUCT_VERSION|EXPORT_SCHEMA_VERSION")


def ranges_of(db):
    """{name: (start, end, globalTid)} of the outermost ranges of the default domain, the last of each name."""
    rows = db.execute(
        "SELECT coalesce(text, (SELECT value FROM StringIds WHERE id = textId)), start, end, globalTid FROM NVTX_EVENTS "
        "WHERE eventType = 59 AND end IS NOT NULL AND domainId = 0 ORDER BY start"
    ).fetchall()
    return {name: (start, end, thread) for name, start, end, thread in rows}


def has(db, table):
    return db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()[0]


def cut(source, target, name):
    """Write the program `name` of the sqlite file `source` into the file `target`."""
    db = sqlite3.connect(source)
    start, end, thread = ranges_of(db)[name]
    target.unlink(missing_ok=True)
    db.execute("ATTACH ? AS out", (str(target),))
    db.execute("PRAGMA out.page_size = 1024")
    zero = start - LEAD_NS
    strings = set()
    correlations = "SELECT correlationId FROM out.CUPTI_ACTIVITY_KIND_RUNTIME"
    for table in (*CALLS, *WORK):
        if not has(db, table):
            continue
        db.execute(db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0].replace(f"CREATE TABLE {table}", f"CREATE TABLE out.{table}"))
        where = f"correlationId IN ({correlations})" if table in WORK else "globalTid = :thread AND start >= :start AND end <= :end"
        where += " AND eventType = 59 AND domainId = 0" if table == "NVTX_EVENTS" else ""
        db.execute(f"INSERT INTO out.{table} SELECT * FROM main.{table} WHERE {where} ORDER BY start", {"thread": thread, "start": start, "end": end})
        db.execute(f"UPDATE out.{table} SET start = start - :zero, end = end - :zero", {"zero": zero})
        columns = [row[1] for row in db.execute(f"PRAGMA out.table_info({table})")]
        for column in set(NAMED) & set(columns):
            strings |= {row[0] for row in db.execute(f"SELECT DISTINCT {column} FROM out.{table} WHERE {column} IS NOT NULL")}
        if table in WORK and not db.execute(f"SELECT count(*) FROM out.{table}").fetchone()[0]:
            db.execute(f"DROP TABLE out.{table}")  # nsys makes no empty tables
    db.execute("CREATE TABLE out.StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    db.executemany("INSERT INTO out.StringIds SELECT id, value FROM main.StringIds WHERE id = ?", [(each,) for each in sorted(strings)])
    for table in ENUMS:
        db.execute(f"CREATE TABLE out.{table} (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT)")
        used = "WHERE name LIKE 'Nvtx%' OR name LIKE '%CUDA%'"
        db.execute(f"INSERT INTO out.{table} SELECT id, name, label FROM main.{table} {used}")
    db.execute("CREATE TABLE out.META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
    meta = db.execute("SELECT name, value FROM main.META_DATA_EXPORT").fetchall()
    db.executemany("INSERT INTO out.META_DATA_EXPORT VALUES (?, ?)", [row for row in meta if WANTED_META.match(row[0])])
    if has(db, "TARGET_INFO_GPU"):
        db.execute("CREATE TABLE out.TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, smCount INTEGER, computeMajor INTEGER, computeMinor INTEGER)")
        db.execute("INSERT INTO out.TARGET_INFO_GPU SELECT id, name, smCount, computeMajor, computeMinor FROM main.TARGET_INFO_GPU")
    db.commit()
    db.execute("DETACH out")
    db.close()
    small = sqlite3.connect(target)
    small.execute("VACUUM")
    small.close()


def ask(nsys, path):
    """What nsys says of an exported file: {report: [row, …]}; a report that nsys skips for want of data is an empty list."""
    said = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)  # nsys may write into what it reads
        copy.write_bytes(path.read_bytes())
        for command, option, report in (*(("stats", "--report", each) for each in REPORTS), ("analyze", "--rule", GAPS)):
            done = subprocess.run([nsys, command, option, report, "--format", "json", "--quiet", "--output", "-", str(copy)], capture_output=True, text=True, check=False)
            found = re.search(r"\[\s*\{.*\}\s*\]", done.stdout, re.S)
            rows = json.loads(found.group()) if found else []
            said[report.split(":")[0]] = [[row["Start (ns)"], row["Duration (ns)"]] for row in rows] if report == GAPS else rows
            if not found:
                print(path.name, report, "→ nothing:", (done.stdout + done.stderr).strip()[-200:])
    return said


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nsys", default="nsys")
    parser.add_argument("--placeholder", action="store_true")
    options = parser.parse_args()
    plain, node, whole = (json.loads((options.folder / f"{name}.json").read_text()) for name in ("plain", "node", "whole"))
    HERE.mkdir(exist_ok=True)
    for old in HERE.iterdir():
        old.unlink()
    for name in node["us_per_request"]:
        cut(options.folder / "node.sqlite", HERE / f"{name}.sqlite", name)
    cut(options.folder / "whole.sqlite", HERE / "whole_graph.sqlite", "graph")
    said = {path.stem: ask(options.nsys, path) for path in sorted(HERE.glob("*.sqlite"))}
    (HERE / "nsys.json").write_text(json.dumps(said, ensure_ascii=False) + "\n", encoding="utf-8")
    product = sqlite3.connect(HERE / "graph.sqlite").execute("SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PRODUCT_VERSION'").fetchone()[0]
    about = {
        "gpu": node["gpu"],
        "driver": node["driver"],
        "versions": node["versions"] | {"nsys": product},
        "recorded_at": date.today().isoformat(),
        "requests": node["requests"],
        "us_per_request": {"plain": plain["us_per_request"], "node": node["us_per_request"], "graph": whole["us_per_request"]},
    }
    if options.placeholder:
        about |= {"gpu": "合成占位数据，不是实测", "synthetic": True}
    (HERE / "about.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(sum(path.stat().st_size for path in HERE.iterdir()) // 1024, "KiB")


if __name__ == "__main__":
    main()
