"""``python -m lab.plots``: draw the plots of the studies from their results.

It needs matplotlib and nothing of this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

STUDIES = Path(__file__).parent / "studies"
COLOURS = ("#0b62a4", "#c8531c", "#2e7d32", "#7b3fa0", "#8a6d00", "#a3195b")
GREY, SDP = "#8b949e", "#0b62a4"


def read(name: str) -> dict[str, Any]:
    """Return the figures in studies/``name``.json."""
    return json.loads((STUDIES / f"{name}.json").read_text(encoding="utf-8"))


def new_figure(width: float, height: float, columns: int, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` × ``height`` inches and its panels in one row."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, sharey=share_y, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#d8dde3", linewidth=0.7)
        axes.set_axisbelow(True)
    return figure, panels


def save(figure: Figure, name: str) -> None:
    """Write ``figure`` to studies/``name``.png, without the program's version in its metadata."""
    figure.savefig(STUDIES / f"{name}.png", metadata={"Software": ""})


def draw_bench() -> None:
    """Draw speed over DDP and peak memory of every method, four hosts at 1 Gbit/s and 64 tokens."""
    rows = read("bench/results")["hosts_64_tokens"][::-1]
    names = [row["method"] for row in rows]
    colours = [SDP if name.startswith("sdp") else GREY for name in names]
    figure, (speed, memory) = new_figure(10, 5.2, 2, share_y=True)
    for axes, measured, planned in ((speed, "speed", "planned_speed"), (memory, "peak_mb", "planned_peak_mb")):
        axes.barh(names, [row[measured] for row in rows], color=colours, height=0.7)
        plans = [(row[planned], row["method"]) for row in rows if row[planned] is not None]
        axes.plot([x for x, _ in plans], [name for _, name in plans], "D", color="black", markersize=4, label="planned")
    for position, row in enumerate(rows):
        least_x = max(row["speed"], row["planned_speed"])
        speed.text(least_x + 0.07, position, f"{row['speed']:.2f} ×", va="center", fontsize=9)
        most_x = max(row["peak_mb"], row["planned_peak_mb"] or 0)
        memory.text(most_x + 6, position, f"{row['peak_mb']:.1f}", va="center", fontsize=9)
    speed.set(title="Speed over DDP (more is better)", xlabel="× DDP", xlim=(0, 4.7))
    memory.set(title="Peak of live tensors (less is better)", xlabel="MB", xlim=(0, 420))
    speed.legend(frameon=False, loc="lower right")
    save(figure, "bench/plot")


def draw_local_steps() -> None:
    """Draw speed over DDP and peak memory of local steps, four hosts at 100 Mbit/s."""
    rows = read("local_steps/results_speed")["methods"]
    names = list(rows)[::-1]
    colours = [SDP if name.startswith("sdp") else GREY for name in names]
    figure, (speed, memory) = new_figure(10, 4.2, 2, share_y=True)
    for axes, key, factor, form in ((speed, "speed_over_ddp", 1.0, "{:.1f} ×"), (memory, "peak_bytes", 1e-6, "{:.1f}")):
        values = [rows[name][key] * factor for name in names]
        axes.barh(names, values, color=colours, height=0.7)
        for position, value in enumerate(values):
            axes.text(value + 0.01 * max(values), position, form.format(value), va="center", fontsize=9)
        axes.set_xlim(0, 1.15 * max(values))
    speed.set(title="Speed over DDP (more is better)", xlabel="× DDP")
    memory.set(title="Peak of live tensors (less is better)", xlabel="MB")
    save(figure, "local_steps/plot")


def draw_instruments() -> None:
    """Draw held-out loss by masking, for every way to choose holders and learning rates.

    Both dense models are lines.
    """
    cells = {(cell["row"], cell["column"]): cell for cell in read("masking/results")["cells"]}
    figure, (axes,) = new_figure(8, 4.2, 1)
    maskings = ("forward", "backward", "forward, then backward")
    for index, (column, colour) in enumerate(
        zip(("uniform", "noise", "depth", "depth, rates by holders"), COLOURS, strict=False)
    ):
        own = [cells[masking, column] for masking in maskings]
        places = [place + (index - 1.5) * 0.12 for place in range(len(maskings))]
        axes.errorbar(
            places, [cell["mean"] for cell in own], [cell["spread"] for cell in own], color=colour, marker="o",
            capsize=4, linestyle="none", label=column,
        )  # fmt: skip
    for row, style in (("smaller dense, equal memory", "--"), ("dense", ":")):
        axes.axhline(cells[row, "uniform"]["mean"], color="black", linewidth=1.2, linestyle=style, label=row)
    axes.set_xticks(range(len(maskings)), maskings)
    axes.set(ylabel="held-out loss of the full model")
    axes.legend(frameon=False, fontsize=9)
    save(figure, "masking/plot")


def draw_workers() -> None:
    """Draw held-out loss minus that of the smaller dense model, by the number of workers.

    There is a panel for each capacity.
    """
    schedule = "forward, then backward"
    colours = {"dense": "black", "forward": COLOURS[0], "backward": COLOURS[1], schedule: COLOURS[2]}
    colours[f"{schedule}, one rate"] = COLOURS[3]
    found = [one for name in ("results", "results_128") for one in read(f"workers/{name}")["differences"]]
    figure, panels = new_figure(10, 4.4, 2, share_y=True)
    for axes, capacity, reference, rows in (
        (panels[0], 0.5, "smaller dense, equal memory", tuple(colours)),
        (panels[1], 0.25, "smaller dense, memory of C = 0.25", ("dense", "backward, C = 0.25")),
    ):
        workers: set[int] = set()
        for row in rows:
            own = [one for one in found if (one["row"], one["less"]) == (row, reference)]
            places = [int(one["column"].split()[0]) for one in own]
            name = row.removesuffix(", C = 0.25")
            axes.errorbar(
                places, [one["mean"] for one in own], [one["spread"] or 0 for one in own], marker="o", capsize=4,
                color=colours[name], linestyle=":" if row == "dense" else "-",
                label=name if row == "dense" else f"SDP, {name}",
            )  # fmt: skip
            workers |= set(places)
        axes.axhline(0, color="black", linewidth=1.2, linestyle="--", label="smaller dense")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(workers), map(str, sorted(workers)))
        axes.set(title=f"C = {capacity:g}", xlabel="workers")
        axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("held-out loss, less the smaller dense model's")
    save(figure, "workers/plot")


def draw_uniform_holders() -> None:
    """Draw loss against learning rate: uniform holders, and fewer holders in late blocks."""
    figure, panels = new_figure(10, 4.2, 2)
    uniform = read("uniform_holders/results")["results"]["runs"]
    for axes, workers, other in ((panels[0], 32, "workers/results"), (panels[1], 128, "workers/results_128")):
        depth = read(other)["results"]["runs"]
        for capacity, colour, name in ((0.25, COLOURS[1], "backward_C_0.25"), (0.5, COLOURS[0], "backward")):
            for label, runs, row, style in (
                ("uniform", uniform, f"backward_uniform_C_{capacity:g}", "-"),
                ("depth, rates by holders", depth, name, ":"),
            ):
                points = sorted(
                    (float(key.split("-lr")[1].split("-")[0]), run["loss"])
                    for key, run in runs.items()
                    if key.startswith(f"{row}-{workers}_workers-") and key.endswith("seed0")
                )
                axes.plot(
                    *zip(*points, strict=True), style, color=colour, marker="o", label=f"C = {capacity:g}, {label}"
                )
        axes.set_xscale("log", base=2)
        axes.set(title=f"{workers} workers", xlabel="learning rate")
    panels[0].set_ylabel("held-out loss, seed 0")
    figure.legend(
        *panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    save(figure, "uniform_holders/plot")


def draw_paths() -> None:
    """Draw loss against rate and prompt, and how far each row is ahead of the dense model."""

    def of_runs(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return runs by row, rate and seed, and those with the best rate by row and seed."""
        by_row = dict[str, dict[float, dict[int, dict[str, Any]]]]()
        for run, found in read(name).items():
            row, _, rest = run.partition("-prefix_64-lr" if "-prefix_64-lr" in run else "-large-lr")
            rate, _, seed = rest.partition("-seed")
            by_row.setdefault(row, {}).setdefault(float(rate), {})[int(seed)] = found
        return by_row, {row: min(r.values(), key=lambda seeds: seeds[0]["64"]["loss"]) for row, r in by_row.items()}

    figure, (rates, prompts, leads) = new_figure(13, 3.8, 3)
    by_row, best = of_runs("paths/prompts_large")
    for row, colour in (("dense", GREY), ("paths_half_shared", SDP)):
        tried, label = sorted(by_row[row]), row.replace("paths_", "paths, ").replace("_", " ")
        losses = [by_row[row][rate][0]["64"]["loss"] for rate in tried]
        rates.plot(tried, losses, "o-", color=colour, label=label)
        lengths = ["16", "64", "128"]
        means = [mean([found[length]["loss"] for found in best[row].values()]) for length in lengths]
        prompts.plot(lengths, means, "o-", color=colour, label=label)
    rates.set(title="First corpus: 64 bytes, seed 0", xlabel="learning rate", ylabel="held-out loss (nats a byte)")
    rates.set(xscale="log")
    prompts.set(title="First corpus: mean of the seeds", xlabel="bytes of the prompt")
    rates.set_xticks([0.008, 0.016, 0.032, 0.064], ["0.008", "0.016", "0.032", "0.064"])
    rates.minorticks_off()
    rates.legend(frameon=False)
    studies = {
        "first corpus, width 48": ("paths/prompts_large", SDP),
        "first corpus, width 32": ("paths/prompts", GREY),
        "second corpus, width 48": ("paths/prompts_second", COLOURS[1]),
    }
    for label, (name, colour) in studies.items():
        _, best = of_runs(name)
        dense = best.pop("dense")
        points = [
            (dense[seed]["64"]["loss"] - found["64"]["loss"], row.replace("_", " "))
            for row, seeds in sorted(best.items(), key=lambda pair: -pair[1][0]["64"]["loss"])
            for seed, found in seeds.items()
        ]
        leads.plot(*zip(*points, strict=True), "o", color=colour, label=label, alpha=0.8)
    leads.axvline(0, color="black", linewidth=0.8)
    leads.legend(frameon=False, fontsize=7)
    leads.set(title="Ahead of dense, each seed", xlabel="nats a byte after 64 bytes")
    save(figure, "paths/plot")


def draw_facts() -> None:
    """Draw loss against a device's bytes of state, and how far SDP is ahead against the facts."""
    results = read("facts/results")
    size = {name.rpartition(" ")[0]: found["state"] / 1e3 for name, found in results["bytes"].items()}
    tried: dict[str, dict[str, dict[float, list[float]]]] = {}  # by row, rate and bits, seed by seed
    for key, run in results["runs"].items():
        name, bits, rate, _ = key.rsplit(" ", 3)
        found = tried.setdefault(name, {}).setdefault(rate, {})
        found.setdefault(float(bits.removeprefix("bits=")), []).append(run["loss"])
    best = {name: min(rates.values(), key=lambda found: found[1.0][0]) for name, rates in tried.items()}
    losses = {name: {bits: mean(of) for bits, of in found.items()} for name, found in best.items() if len(found) > 1}
    figure, (axes, leads) = new_figure(11, 4.2, 2)
    kinds = {"sdp": ("SDP, int8 copies", SDP, "o"), "smaller": ("smaller dense, as many steps", GREY, "s"),
             "longer": ("… as many operations", COLOURS[1], "^"), "peak": ("dense, equal peak", COLOURS[2], "v"),
             "dense": ("dense", "black", "D")}  # fmt: skip
    for kind, (label, colour, marker) in kinds.items():
        rows = [name for name in losses if kind == ("longer" if "longer" in name else name.split()[0].strip(","))]
        xs, ys = zip(*sorted((size[name.removesuffix(" longer")], losses[name][1.0]) for name in rows), strict=True)
        axes.plot(xs, ys, marker=marker, color=colour, label=label, linestyle="" if kind == "dense" else "-")
    axes.set(yscale="log", xlabel="state of a device, kB", ylabel="loss over all facts, nats", title="One bit")
    axes.legend(frameon=False)
    for capacity, colour in (("0.125", COLOURS[1]), ("0.25", SDP), ("0.5", GREY)):
        plain, longer = sorted(name for name in losses if name.startswith(f"smaller {capacity} "))
        (peak,) = (name for name in losses if name.startswith(f"peak {capacity} "))
        for other, line, label in ((plain, "o-", f"C = {capacity}"), (longer, "^--", None), (peak, "v:", None)):
            ahead = {bits: losses[other][bits] - loss for bits, loss in losses[f"sdp {capacity}"].items()}
            leads.plot(*zip(*sorted(ahead.items()), strict=True), line, color=colour, label=label)
    leads.axhline(0, color="black", linewidth=0.8)
    leads.set(xscale="log", xlabel="bits of facts for each parameter", ylabel="nats")
    leads.set(title="SDP ahead (dashed: equal operations, dotted: peak)")
    leads.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    leads.minorticks_off()
    leads.legend(frameon=False)
    save(figure, "facts/plot")


def draw_given_model() -> None:
    """Draw the loss on each new text against the length of training, at the state of C = 0.25."""
    losses: dict[str, dict[str, dict[int, list[float]]]] = {}  # by text, method and length, seed by seed
    tuning: dict[str, dict[str, float]] = {}  # by method and rate
    runs = {tuple(key.split(" | ")): run["new"] for key, run in read("given_model/results")["runs"].items()}
    for (method, text, tokens, rate, seed), loss in runs.items():
        if (text, tokens, seed) == ("C++", "10", "seed 0"):
            tuning.setdefault(method, {})[rate] = loss
    best = {method: min(rates, key=lambda rate: rates[rate]) for method, rates in tuning.items()}
    for (method, text, tokens, rate, _), loss in runs.items():
        if rate == best[method]:
            losses.setdefault(text, {}).setdefault(method, {}).setdefault(int(tokens), []).append(loss)
    kinds = {"full": "black", "sdp 0.25": SDP, "sdp 0.25, every 20": COLOURS[5], "lora 0.25": COLOURS[1],
             "lora 0.25, with the rest": COLOURS[4], "badam 0.25": COLOURS[2], "last 0.25": GREY}  # fmt: skip
    figure, panels = new_figure(10, 4.2, len(losses))
    for axes, (text, methods) in zip(panels, losses.items(), strict=True):
        for method, colour in kinds.items():
            lengths = sorted(methods[method])
            axes.plot(lengths, [mean(methods[method][length]) for length in lengths], "o-", color=colour, label=method)
        axes.set(title=text, xscale="log", xlabel="bytes of training for each parameter", ylabel="loss, nats a byte")
        axes.set_xticks([1, 10, 50], ["1", "10", "50"])
    panels[0].legend(frameon=False)
    save(figure, "given_model/plot")


def draw_columns(study: str, label: str) -> None:
    """Draw held-out loss, and its difference from the smaller dense model, by column.

    The columns' names contain the number for the horizontal axis.
    """
    figures = read(f"{study}/results")
    colours = {
        "dense": "black", "dense, six blocks": COLOURS[3], "smaller dense, equal memory": GREY,
        "backward": COLOURS[1], "forward, then backward": COLOURS[2], "forward": COLOURS[0],
    }  # fmt: skip
    figure, (losses, less) = new_figure(10, 4.2, 2)
    numbers = sorted({_number(cell) for cell in figures["cells"]})
    for row, colour in colours.items():
        name = row.removesuffix(", equal memory") if "dense" in row else f"SDP, {row}"
        for axes, found in (
            (losses, figures["cells"]),
            (less, [one for one in figures["differences"] if one["less"] == "smaller dense, equal memory"]),
        ):
            own = sorted((_number(one), one["mean"], one["spread"] or 0) for one in found if one["row"] == row)
            if own:
                axes.errorbar(
                    [number for number, _, _ in own], [mean for _, mean, _ in own], [spread for _, _, spread in own],
                    marker="o", capsize=4, color=colour, label=name,
                )  # fmt: skip
    less.axhline(0, color=GREY, linewidth=1.2, linestyle="--", label="smaller dense")
    losses.set(ylabel="held-out loss of the full model")
    less.set(ylabel="less the smaller dense model's")
    for axes in (losses, less):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, map(str, numbers))
        axes.set(xlabel=label)
        axes.legend(frameon=False, fontsize=9)
    save(figure, f"{study}/plot")


def draw_small_share() -> None:
    """Draw the loss, and SDP's loss minus that of dense models of nearly equal state or peak."""
    figures = read("small_share/results")
    rows = {
        "dense": ("black", "-"), "dense, six blocks": (COLOURS[3], "-"), "dense, five blocks": (COLOURS[2], "-"),
        "dense, three blocks": (COLOURS[4], "-"), "dense, two blocks": (COLOURS[5], "-"),
        "dense, one block": (GREY, "-"),
        "SDP, C = 0.25": (COLOURS[0], "--"), "SDP, C = 0.125": (COLOURS[1], "--"),
    }  # fmt: skip
    pairs = {
        ("SDP, C = 0.25", "dense, six blocks"): "C = 0.25, less six blocks (0.99 of its peak)",
        ("SDP, C = 0.25", "dense, three blocks"): "C = 0.25, less three blocks (0.89 of its state)",
        ("SDP, C = 0.125", "dense, five blocks"): "C = 0.125, less five blocks (0.90 of its peak)",
        ("SDP, C = 0.125", "dense, two blocks"): "C = 0.125, less two blocks (0.81 of its state)",
    }
    figure, (losses, less) = new_figure(11, 4.4, 2)
    for row, (colour, line) in rows.items():
        own = [cell for cell in figures["cells"] if cell["row"] == row]
        _draw_cells(losses, own, color=colour, linestyle=line, label=row)
    for (row, other), label in pairs.items():
        own = [one for one in figures["differences"] if (one["row"], one["less"]) == (row, other)]
        colour, marker = rows[row][0], "s" if "peak" in label else "o"
        _draw_cells(less, own, marker=marker, color=colour, linestyle=":" if "peak" in label else "-", label=label)
    less.axhline(0, color="black", linewidth=0.8)
    losses.set(ylabel="held-out loss of the full model")
    less.set(ylabel="SDP less the dense model (below 0: SDP is ahead)")
    for axes in (losses, less):
        axes.set_xscale("log", base=2)
        axes.set_xticks([50, 200, 800], ["50", "200", "800"])
        axes.set(xlabel="tokens per parameter")
        axes.legend(frameon=False, fontsize=8)
    save(figure, "small_share/plot")


def _draw_cells(axes: Axes, cells: list[dict[str, Any]], *, marker: str = "o", **style: Any) -> None:
    xs, ys, errors = zip(*sorted((_number(cell), cell["mean"], cell["spread"] or 0) for cell in cells), strict=True)
    axes.errorbar(xs, ys, errors, marker=marker, capsize=4, **style)


def _number(cell: Mapping[str, Any]) -> int:
    return next(int(word) for word in cell["column"].split() if word.isdigit())


def draw_memory() -> None:
    """Draw planned (line) and measured (dot) peak by capacity, with a panel for each model."""
    data = read("memory/results")
    variants = ("block forward", "block backward", "neuron forward", "neuron backward")
    figure, panels = new_figure(11, 4.2, 3)
    for axes, (model, title) in zip(
        panels, (("resnet18", "ResNet-18"), ("swin_t", "Swin-T"), ("llama_134m", "LLaMA-134M")), strict=True
    ):
        dense = next(row for row in data[model] if row["variant"] == "dense")
        for variant, colour in zip(variants, COLOURS, strict=False):
            rows = [row for row in data[model] if row["variant"] == variant] + [dense]
            capacities = [row["capacity"] for row in rows]
            axes.plot(capacities, [row["peak"][0] for row in rows], color=colour, linewidth=1.6)
            axes.plot(capacities, [row["peak"][1] for row in rows], "o", color=colour, markersize=5)
        axes.set(title=title, xlabel="capacity", xticks=[0.25, 0.5, 0.75, 1], ylim=(0, dense["peak"][0] * 1.12))
    panels[0].set_ylabel("peak of live tensors, MB")
    handles = [Line2D([], [], color=colour, label=variant) for variant, colour in zip(variants, COLOURS, strict=False)]
    handles.append(Line2D([], [], color="black", label="planned"))
    handles.append(Line2D([], [], color="black", marker="o", linestyle="none", label="measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    save(figure, "memory/plot")


def draw_profiles(model: str, methods: tuple[str, ...]) -> None:
    """Draw held-out loss by capacity, with deviations. Each granularity has a panel."""
    data = read("profiles/results")[model]
    figure, panels = new_figure(10, 4.8, 2, share_y=True)
    for axes, granularity in zip(panels, ("block", "neuron"), strict=True):
        for method, colour in zip(methods, COLOURS, strict=False):
            rows = [row for row in data[granularity] if row["profile"] == method]
            axes.errorbar(
                [row["capacity"] for row in rows],
                [row["mean"] for row in rows],
                [row["spread"] for row in rows],
                color=colour,
                marker="o",
                capsize=4,
                linestyle="--" if "dense" in method else "-",
                label=method,
            )
        capacities = sorted({row["capacity"] for row in data[granularity]})
        axes.set(title=f"{granularity} level", xlabel="capacity", xticks=capacities)
    panels[0].set_ylabel("held-out loss of the full model")
    panels[1].legend(frameon=False)
    save(figure, "profiles/plot" if model == "llama" else f"profiles/plot_{model}")


def draw_gradient_bias() -> None:
    """Draw the bias by unit at initial weights, and overall for every model and masking."""
    data = read("gradient_bias/results")
    figure, (units, overall) = new_figure(11, 4.4, 2)
    for masking, colour in (("forward", COLOURS[0]), ("backward", COLOURS[1])):
        rows = [row for row in data["by_unit"] if row["masking"] == masking and row["unit"] != "overall"]
        names = [row["unit"].replace("model.layers.", "") for row in rows]
        # A bias that the batches cannot show is drawn at zero.
        bias, error = [row["bias"] or 0 for row in rows], [row["standard_error"] or 0 for row in rows]
        label = "forward" if masking == "forward" else "backward: not shown, drawn at zero"
        units.errorbar(names, bias, error, fmt="o", color=colour, capsize=4, label=label)
    units.set(title="Eight blocks at initial weights, by unit", xlabel="layer", ylim=(-0.03, 0.8))
    units.set_ylabel("bias, relative to the dense gradient's norm")
    units.legend(frameon=False, loc="center left")
    cases = [row for row in data["overall"] if row["masking"] == "forward"][::-1]
    labels = [f"{row['model']},\n{row['weights']}" for row in cases]
    for masking, colour in (("forward", COLOURS[0]), ("backward", COLOURS[1])):
        rows = [row for row in data["overall"] if row["masking"] == masking][::-1]
        bias, error = [row["bias"] or 0 for row in rows], [row["standard_error"] or 0 for row in rows]
        overall.errorbar(bias, labels, xerr=error, fmt="o", color=colour, capsize=4)
        overall.plot([row["noise"] for row in rows], labels, "|", color=colour, markersize=12)
    overall.plot([], [], "|", color="black", markersize=12, label="noise: expected without any bias")
    overall.set(title="Overall", xlabel="relative to the dense gradient's norm", xlim=(-0.05, 1.2))
    overall.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    overall.margins(y=0.22)
    save(figure, "gradient_bias/plot")


def draw_service() -> None:
    """Draw the groups in each round of the disturbed run, and the losses of undisturbed runs."""
    result = json.loads((STUDIES.parent / "service/kills_result.json").read_text(encoding="utf-8"))
    figure, (groups, losses) = new_figure(11, 3.8, 2)
    rounds = result["groups_of_rounds"]
    groups.plot(range(1, len(rounds) + 1), rounds, ".", color=SDP, markersize=3)
    groups.set(xlabel="round", ylabel="groups that contributed", title="100 disturbances of four groups")
    groups.set_yticks(range(max(rounds) + 1))
    for number, (seed, lines) in enumerate(result["undisturbed"].items()):
        steps, values = [one["step"] for one in lines[1:]], [one["loss"] for one in lines[1:]]
        losses.plot(steps, values, color=COLOURS[number + 1], label=f"undisturbed, seed {seed}")
    losses.axhline(result["held_out"][-1], color=SDP, linestyle="--", label="disturbed, at its end")
    losses.set(xlabel="step", ylabel="held-out loss of the full model", title="Loss")
    losses.legend(frameon=False, fontsize=9)
    save(figure, "../service/plot")


def draw_gpu() -> None:
    """Draw speed against the state of a rank, both over the dense model, by model and masking."""
    figure, (axes,) = new_figure(8, 3.8, 1)
    styles = {"forward, block": "o-", "backward, block": "s--", "forward, neuron": "^", "backward, neuron": "v"}
    for config, colour in (("llama_1b", COLOURS[0]), ("llama_500m", COLOURS[1]), ("llama_134m", COLOURS[2])):
        points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in styles}
        for name in ("results", "results_neurons"):
            shares = read(f"gpu/{name}")["shares"]
            own = [one for one in shares if one["config"] == config and one["compiled"] and not one["error"]]
            dense = next(one for one in own if one["variant"]["capacity"] == 1)
            for one in own:
                kind = f"{one['variant']['masking']}, {one['variant']['granularity']}"
                if kind in points:
                    speed = one["tokens_per_second"] / dense["tokens_per_second"]
                    points[kind].append((one["state_bytes"] / dense["state_bytes"], speed))
        for kind, found in points.items():
            label = f"{config}, {kind}"
            axes.plot(*zip(*sorted(found), strict=True), styles[kind], color=colour, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="state of a rank, over dense", ylabel="tokens per second, over dense")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save(figure, "gpu/plot")


def draw_epochs() -> None:
    """Draw the lowest held-out loss of each run, by method and regularisation."""
    runs = read("epochs/results_rates")["results"]["runs"]
    methods = {"dense": "dense", "smaller_dense_equal_memory": "smaller dense", "forward": "SDP, forward",
               "backward": "SDP, backward"}  # fmt: skip
    figure, (axes,) = new_figure(7, 3.8, 1)
    for shift, (kind, colour) in enumerate(
        zip(("none", "dropout_0.1", "stochastic_depth_0.1", "stochastic_depth_0.3"), COLOURS, strict=False)
    ):
        for place, method in enumerate(methods):
            found = [run["least"] for name, run in runs.items() if name.startswith(f"{method}-{kind}-lr")]
            x = place + (shift - 1.5) * 0.18
            axes.plot([x] * len(found), found, ".", color=colour, label=None if place else kind.replace("_", " "))
            axes.plot([x - 0.06, x + 0.06], [mean(found)] * 2, color=colour)
    axes.set_xticks(range(len(methods)), methods.values())
    axes.set(ylabel="lowest held-out loss, seed by seed")
    axes.legend(frameon=False, fontsize=9)
    save(figure, "epochs/plot")


def draw_elastic() -> None:
    """Draw how soon the other groups trained on after a kill."""
    figure, (axes,) = new_figure(7, 3.4, 1)
    for name, colour in (("losses", COLOURS[0]), ("losses_again", COLOURS[1]), ("losses_busy", COLOURS[2])):
        seconds = sorted(read(f"elastic/{name}")["kill_to_next_step_seconds"])
        shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
        axes.plot(seconds, shares, drawstyle="steps-post", color=colour, label=name.replace("_", " "))
    axes.set(xscale="log", xlabel="seconds from a kill to the next step", ylabel="share of the kills")
    axes.legend(frameon=False)
    save(figure, "elastic/plot")


def main() -> None:
    """Draw all plots."""
    draw_bench()
    draw_local_steps()
    draw_instruments()
    draw_workers()
    draw_uniform_holders()
    draw_paths()
    draw_facts()
    draw_given_model()
    draw_columns("sizes", "width")
    draw_columns("lengths", "tokens per parameter")
    draw_small_share()
    draw_memory()
    draw_profiles("llama", ("dense", "smaller dense", "uniform", "linear", "depth"))
    draw_profiles("resnet18", ("dense", "smaller dense", "uniform", "depth"))
    draw_gradient_bias()
    draw_service()
    draw_gpu()
    draw_epochs()
    draw_elastic()


if __name__ == "__main__":
    main()
