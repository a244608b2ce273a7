"""A table, plots and a verdict for each load of results of `run.py`. Needs matplotlib (`headrace[bench]`).

.venv/bin/python benchmarks/gpu/report.py RESULT.json [SECOND.json ...] --out FOLDER

Several results are several starts of the same cases: only they tell how far one start is from another.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headrace.cli.bench.compare import plots
from headrace.cli.bench.compare.points import Sweep
from headrace.cli.bench.compare.rounds import merged
from headrace.cli.bench.compare.run import without_lesser_tuned
from headrace.cli.bench.compare.table import markdown
from headrace.cli.bench.compare.verdict import verdict

TITLES = {
    "engines": "bare 1 prefill + 1 decode",
    "headrace": "headrace 1 prefill + 1 decode",
    "bare-replicas": "bare 2 replicas",
    "replicas": "headrace 2 replicas",
    "coupled": "vllm serve",
}
TUNED = "replicas-"


def main() -> None:
    """Write `<load>/table.md` and plots; print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    runs = [run for result in results for run in result["runs"]]
    facts = [f"- `{run['command']}`: {run['gpus']}" for run in runs]
    cases = dict.fromkeys(name for result in results for name in result["cases"])
    for load in dict.fromkeys(
        load for result in results for case in result["cases"].values() for load in case
    ):
        sweeps = merged([sweep(name, load, results) for name in cases])
        kept = without_lesser_tuned(sweeps)
        folder = options.out / load
        folder.mkdir(parents=True, exist_ok=True)
        sentences = verdict(kept)
        text = markdown(sweeps, sentences, [f"{load}; times in ms.", "", *facts])
        (folder / "table.md").write_text(text, encoding="utf-8")
        plots.draw(kept, folder)
        print(f"{load}:", *sentences, sep="\n  ")


def sweep(name: str, load: str, results: list[dict[str, Any]]) -> Sweep:
    """Return what every result has of a case under a load."""
    points = [point for r in results for point in r["cases"].get(name, {}).get(load, [])]
    return Sweep(name=name, title=title(name), points=points, is_tuned=name.startswith(TUNED))


def title(name: str) -> str:
    """Return a case for people."""
    if name.startswith(TUNED):
        return f"headrace 2 replicas with chunks of {name.removeprefix(TUNED)}"
    return TITLES[name]


if __name__ == "__main__":
    main()
