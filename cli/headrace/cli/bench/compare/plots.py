"""Plots of a comparison, as SVG and PNG. Needs matplotlib (`headrace[bench]`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from headrace.cli.bench.compare.points import Sweep
from headrace.cli.bench.compare.verdict import MEASURES, Measure
from headrace.shared.errors import SettingsError

SIZE = (7.0, 4.5)  # inches
FORMATS = ("svg", "png")


def check_matplotlib() -> None:
    """Look for matplotlib before anything is measured. Raises: SettingsError when it is missing."""
    if find_spec("matplotlib") is None:
        raise SettingsError(
            "plots need matplotlib: `pip install 'headrace[bench]'`, or leave them out: --no-plots"
        )


def draw(sweeps: Sequence[Sweep], folder: Path) -> list[Path]:
    """Write a plot a measure, over the rate, with two standard errors; return the files."""
    return [path for measure in MEASURES for path in _plot(sweeps, measure, folder)]


def _plot(sweeps: Sequence[Sweep], measure: Measure, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for sweep in sweeps:
        known = [(p["rate"], c) for p in sweep.points if (c := p["compared"][measure.key])]
        if known:
            axes.errorbar(
                [rate for rate, _ in known],
                [compared["value"] for _, compared in known],
                yerr=[2 * compared["error"] for _, compared in known],
                marker="o",
                capsize=3,
                label=sweep.title,
            )
    axes.set_title(measure.title)
    axes.set_xlabel("requests/s sent")
    axes.set_ylabel(measure.unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    paths = [folder / f"{measure.key}.{ending}" for ending in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
