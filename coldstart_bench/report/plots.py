"""Draw reports as PNG files for `--plots DIR`. Only this module imports matplotlib.

Three plots: stages stacked per size and tier, with the floor as a line; ratios to the floor by size; loaders side by
side.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from coldstart_bench.report.bench_report import BenchFailed
from coldstart_bench.report.cold_report import FLOOR, KELVIN, UNPROBED, ColdFigures, ColdRow, StageRow
from coldstart_bench.report.load_report import STATES, LoadFigures, LoadRow, is_floor

PLACES: Final = {"host": "host memory", "nvme": "NVMe, cold", "store": "store, cold"}
AT_A_GLANCE: Final = 0.02  # stages shorter than this share of the bar are merged into "others"
OURS, OTHERS, GROUND = "#1b6ca8", "#b8b8b8", "#d1495b"
INKS: Final = (GROUND, "#6a994e", "#8d6a9f", OTHERS)  # line colours of the other systems


class NoPlots(BenchFailed):
    """matplotlib is not installed."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise NoPlots("--plots needs matplotlib: install the extra 'bench'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check() -> None:
    """Raise NoPlots before anything is measured, if matplotlib is missing."""
    _pyplot()


def draw_cold(figures: ColdFigures, directory: Path) -> list[Path]:
    """Draw `cold-stages.png` and `cold-ratios.png`, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    return [
        _stages(figures.stages, figures.rows, directory / "cold-stages.png"),
        _ratios(figures.rows, directory / "cold-ratios.png"),
    ]


def draw_load(figures: LoadFigures, directory: Path) -> list[Path]:
    """Draw `load-SIZEmb.png` for each size, and return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = sorted({row.size_bytes for row in figures.rows})
    return [_loaders(figures.rows, size, directory / f"load-{size // 1_000_000}mb.png") for size in sizes]


def stage_bars(stages: Sequence[StageRow]) -> list[tuple[str, float]]:
    """Return name and milliseconds of each stage up to the first token, of one size and tier. Short ones are merged."""
    names = [row.stage for row in stages]
    until = names.index("first_token") + 1 if "first_token" in names else len(names)
    total = sum(row.median_s for row in stages[:until])
    shown = [(row.stage, row.median_s * 1e3) for row in stages[:until] if row.median_s >= AT_A_GLANCE * total]
    rest = total * 1e3 - sum(length for _, length in shown)
    return [*shown, ("others", rest)] if rest > 1e-9 else shown


def _stages(stages: Sequence[StageRow], rows: Sequence[ColdRow], file: Path) -> Path:
    pyplot = _pyplot()
    places = sorted({(row.size_bytes, row.tier) for row in stages}, reverse=True)
    floors = {(row.size_bytes, row.tier): row.median_s * 1e3 for row in rows if row.system == FLOOR}
    bars = {place: stage_bars([row for row in stages if (row.size_bytes, row.tier) == place]) for place in places}
    names = list(dict.fromkeys(name for each in bars.values() for name, _ in each))
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.6 * len(places)))
    for at, place in enumerate(places):
        left = 0.0
        for name, length in bars[place]:
            axes.barh(at, length, left=left, color=colors.get(name, OTHERS), edgecolor="white")
            left += length
        axes.text(left, at, f" {left:.0f} ms", va="center")
        if place in floors:
            axes.plot([floors[place]] * 2, [at - 0.42, at + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(places)), [f"{size / 1e9:.1f} GB, {PLACES.get(tier, tier)}" for size, tier in places])
    axes.set_xlabel("milliseconds from the request to the first token, by stage; black: the floor")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors.get(name, OTHERS)) for name in names]
    axes.legend(handles, names, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, frameon=False)
    return _saved(pyplot, figure, file)


def _ratios(rows: Sequence[ColdRow], file: Path) -> Path:
    """Plot the ratios. Rows without a measured floor are left out."""
    pyplot = _pyplot()
    rows = [row for row in rows if row.ratio_to_floor is not None]
    tiers, systems = sorted({row.tier for row in rows}), sorted({row.system for row in rows} - {FLOOR})
    inks = dict(zip((each for each in systems if not each.startswith(KELVIN)), INKS * len(systems), strict=False))
    ticks = sorted({row.size_bytes for row in rows})
    columns = max(1, len(tiers))
    figure, panels = pyplot.subplots(1, columns, figsize=(5 * columns, 4), sharey=True, squeeze=False)
    for axes, tier in zip(panels[0], tiers, strict=False):
        for system in systems:
            here = [row for row in rows if (row.tier, row.system) == (tier, system)]  # by size
            if not here:
                continue
            color, dashes = inks.get(system, OURS), "--" if system == UNPROBED else "-"
            sizes, ratios = [row.size_bytes / 1e9 for row in here], [row.ratio_to_floor for row in here]
            axes.plot(sizes, ratios, marker="o", label=system, color=color, linestyle=dashes)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set(xscale="log", yscale="log", title=PLACES.get(tier, tier), xlabel="GB of weights")
        axes.set_xticks([size / 1e9 for size in ticks], [f"{size / 1e9:.1f}" for size in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("first token, times the floor's")
    return _saved(pyplot, figure, file)


def _loaders(rows: Sequence[LoadRow], size: int, file: Path) -> Path:
    """Draw a panel per state: totals as bars, with the consumer's part paler, and the fastest floor as a line."""
    pyplot = _pyplot()
    here = [row for row in rows if row.size_bytes == size]
    states = [state for state in STATES if any(row.state == state for row in here)]
    figure, panels = pyplot.subplots(1, len(states), figsize=(5 * len(states), 4), squeeze=False)
    for axes, state in zip(panels[0], states, strict=True):
        loads = sorted((row for row in here if row.state == state and not is_floor(row)), key=lambda row: -row.total_s)
        for at, row in enumerate(loads):
            color = OURS if row.system == "kelvin" else OTHERS
            axes.barh(at, row.load_s * 1e3, color=color)
            axes.barh(at, row.consume_s * 1e3, left=row.load_s * 1e3, color=color, alpha=0.5)
            axes.text(row.total_s * 1e3, at, f" {row.total_s * 1e3:.0f}", va="center", fontsize=8)
        floor_s = min((row.total_s for row in here if row.state == state and is_floor(row)), default=None)
        if floor_s is not None:
            axes.axvline(floor_s * 1e3, color=GROUND, linestyle=":")
        axes.set_yticks(range(len(loads)), [f"{row.system}{' ✓' if row.verifies else ''}" for row in loads])
        axes.set(title=f"{size / 1e9:.1f} GB, {state}", xlabel="milliseconds")
        axes.set_ylim(-0.6, max(3, len(loads)) - 0.4)
        axes.margins(x=0.15)
    figure.suptitle("until every byte was read: load, consumer (pale); dotted: plain reads; ✓ verifies", fontsize=10)
    return _saved(pyplot, figure, file)


def _saved(pyplot: Any, figure: Any, file: Path) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file
