# SPDX-License-Identifier: Apache-2.0
"""A page about one run, from what it has written so far: curves of its metrics, its samples at first and last.

    write_report("checkpoints/posttraining/reinforcement_learning/NAME")   # -> .../NAME/report.html

The page is one file: videos are inside, where they are small enough.
"""

import base64
import math
import re
from collections.abc import Mapping, Sequence

from cosmos_predict2.checkpoints.card import run_tree
from cosmos_predict2.evaluation.reports.evaluation_page import Page, PageVideo, Points
from imaginaire import foreign_json, storage
from imaginaire.errors import DataError

REPORT = "report.html"
LARGEST_VIDEO = 8 << 20  # bytes; a larger one is linked
MOVING = "PSNR where something moves, dB"
TILES = {
    "train/reward_mean": "reward",
    "val/greedy_success": "success, held out",
    "val/imagined_greedy_success": "imagined success, held out",
    "samples/moving_psnr_ema": MOVING,
    "val/loss": "validation loss",
}
Record = Mapping[str, float]
Lines = dict[str, Points]
# What is drawn together, by the ends of the metrics' names; a drawing without any is left out.
SUCCESS: dict[str, tuple[str, ...]] = {
    "Greedy, of held-out starts": ("val/greedy_success", "val/imagined_greedy_success"),
    "Imagined beside true": ("val/imagined_success", "val/true_success"),
    "Imagined success": ("val/true_positive_rate", "val/false_positive_rate"),
    "In training": ("train/success", "train/groups_with_spread"),
}
LEARNING: dict[str, tuple[str, ...]] = {
    "Ratio of new to old probability": ("train/log_prob_ratio", "train/ratio_mean"),
    "Spread of the ratio": ("train/ratio_std", "train/clip_fraction_above", "train/clip_fraction_below"),
    "Share of clipped ratios": ("train/clip_fraction",),
    "Entropy": ("train/entropy",),
    "Loss of the world model": ("train/edm_loss",),
    "Distance to the reference, and from update to update": ("train/kl_loss", "train/approx_kl"),
    "Groups without spread": ("train/groups_without_spread",),
    "Size of advantages": ("train/advantage_abs",),
    "Loss": ("train/loss", "train/policy_loss", "train/data_loss"),
    "Validation loss": ("val/loss",),
    "Gradient norm": ("train/grad_norm",),
    "Learning rate": ("optim/lr_0",),
    "Seconds an iteration": ("train/s_per_iter",),
}


def write_report(run_dir: str) -> str:
    """Write the page into the run's folder; its path."""
    records = read_records(run_dir)
    tree = run_tree(run_dir)
    lines = by_name(records)
    name = tree.get("job", {}).get("name") or run_dir.rstrip("/").rpartition("/")[2]
    page = Page(f"Run {name}", _facts(run_dir, records, tree), video_width=560)
    if sentence := verdict(lines):
        page.verdict(sentence)
    page.tiles(_tiles(lines))
    _show_samples(page, run_dir)
    rewards = reward_plots(lines)
    _show(page, "Rewards", "Of the clips that training generates; 10th and 90th percentile beside the mean.", rewards)
    measured = {_short(name): {_short(name): lines[name]} for name in lines if _is_measure(name)}
    _show(page, "Held-out quality", "The same clips from the same noise each time; never a reward.", measured)
    likeness = {
        title: {_short(name): lines[name] for name in lines if name.startswith(start)}
        for title, start in {"PSNR, dB": "samples/psnr_", MOVING: "samples/moving_psnr_"}.items()
    }
    _show(page, "Likeness of the samples to the truth", "", likeness)
    successes = "Imagined and true success of the same actions; the gap is what exploits the world model."
    for heading, note, table in (("Success", successes, SUCCESS), ("Learning", "", LEARNING)):
        _show(page, heading, note, plots_of(lines, table))
    path = storage.join(run_dir, REPORT)
    storage.write_text(path, page.as_html())
    return path


def read_records(run_dir: str) -> list[dict[str, float]]:
    """The records of metrics.jsonl, without a line that is being written."""
    path = storage.join(run_dir, "metrics.jsonl")
    if not storage.exists(path):
        raise DataError(f"{run_dir} has no metrics.jsonl: name the folder of a run, checkpoints/PROJECT/GROUP/NAME.")
    records = []
    for line in storage.read_text(path).splitlines():
        try:
            record = foreign_json.loads(line, constants=True)
            record["iteration"] = int(record["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
        records.append(record)
    if not records:
        raise DataError(f"{path} has no record yet: a run writes its first one at trainer.logging_iter.")
    return records


def by_name(records: Sequence[Record]) -> Lines:
    """(iteration, value) of each metric; of an iteration that was repeated, the last one."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "iteration" and isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(name, {})[record["iteration"]] = float(value)
    return {name: sorted(values.items()) for name, values in found.items()}


def plots_of(lines: Lines, table: Mapping[str, Sequence[str]]) -> dict[str, Lines]:
    """A drawing for each title of a table that has one of its metrics, named without their first part."""
    drawn = {title: {_short(name): lines[name] for name in names if name in lines} for title, names in table.items()}
    return {title: of_title for title, of_title in drawn.items() if of_title}


def verdict(lines: Lines) -> str:
    """A sentence on whether the alarm went off; empty for a run without one."""
    if "quality/alarm" not in lines:
        return ""
    alarms = [f"{iteration:g}" for iteration, value in lines["quality/alarm"] if value]
    if not alarms:
        return "No alarm: no held-out measure has fallen while the reward rose."
    back = [f"{at:g} to {to:g}" for at, to in lines.get("quality/rolled_back_to", ())]
    went = f" The run went back from iteration {', '.join(back)}." if back else ""
    return (
        f"Alarm at iteration {', '.join(alarms)}: a held-out measure fell while the reward rose, so the model learns to"
        f" please the reward.{went}"
    )


def reward_plots(lines: Lines) -> dict[str, Lines]:
    """A drawing for the sum, and one for each reward with its percentiles."""
    names = [name.removesuffix("_valid_rate") for name in lines if re.match("train/.*_valid_rate", name)]
    plots: dict[str, Lines] = {}
    if len(names) > 1 and "train/reward_mean" in lines:
        plots["Weighted sum"] = {"reward_mean": lines["train/reward_mean"]}
    for name in names:
        ends = {"mean": name, "p10": f"{name}_p10", "p90": f"{name}_p90"}
        plots[_short(name)] = {label: lines[key] for label, key in ends.items() if key in lines}
    valid = {_short(name): lines[f"{name}_valid_rate"] for name in names}
    if any(value < 1 for line in valid.values() for _, value in line):
        plots["Share of valid scores"] = valid
    return plots


def _facts(run_dir: str, records: Sequence[Record], tree: Mapping[str, object]) -> list[str]:
    trainer, model = tree.get("trainer"), tree.get("model")
    most = trainer.get("max_iter") if isinstance(trainer, Mapping) else None
    facts = [f"iteration {max(r['iteration'] for r in records):g}" + (f" of {most}" if most else ""), run_dir]
    config = model.get("config") if isinstance(model, Mapping) else None
    rl = config.get("rl") if isinstance(config, Mapping) else None
    if isinstance(rl, Mapping) and "num_rollout" in rl:
        facts.append(f"{rl['objective']}, {rl.get('transition')}, groups of {rl.get('num_rollout')}")
    elif isinstance(rl, Mapping):
        facts.append(f"a policy, groups of {rl.get('group_size')} episodes")
    return facts


def _tiles(lines: Lines) -> list[tuple[str, str, str, str]]:
    """First and last values of what matters; higher is better, but for losses."""
    names = [name for name in TILES if name in lines]
    names[1:1] = filter(_is_measure, lines)
    tiles = []
    for name in names:
        (_, first), (_, last) = lines[name][0], lines[name][-1]
        change = last - first
        is_good = change < 0 if "loss" in name else change > 0
        kind = "" if abs(change) < 1e-9 else "good" if is_good else "bad"
        tiles.append((TILES.get(name, _short(name)), f"{last:.4g}", f"{change:+.3g} since the start", kind))
    return tiles


def _show(page: Page, title: str, note: str, plots: Mapping[str, Lines]) -> None:
    plots = {name: lines for name, lines in plots.items() if lines}
    if plots:
        page.heading(title, note)
        page.plots(plots, "iteration")


def _show_samples(page: Page, run_dir: str) -> None:
    """The first and the newest video of each guidance."""
    folder = storage.join(run_dir, "samples")
    found: dict[str, list[tuple[int, str]]] = {}
    for file in storage.listdir(folder):
        if match := re.fullmatch(r"iter_(\d+)_(.+)\.mp4", file):
            found.setdefault(match[2], []).append((int(match[1]), file))
    if not found:
        return
    page.heading("Samples before and after", "The same ones each time, the truth beside what is generated.")
    for kind, files in sorted(found.items()):
        ends = [min(files), max(files)] if len(files) > 1 else files
        page.clips([PageVideo(f"iteration {k}, {kind.replace('_', ' ')}", _address(folder, file)) for k, file in ends])


def _address(folder: str, file: str) -> str:
    """An address that holds the whole video, or the place of a large one beside the page."""
    content = storage.local_copy(storage.join(folder, file)).read_bytes()
    if len(content) > LARGEST_VIDEO:
        return f"samples/{file}"
    return "data:video/mp4;base64," + base64.b64encode(content).decode()


def _is_measure(name: str) -> bool:
    return name.startswith("quality/") and name not in ("quality/alarm", "quality/rolled_back_to")


def _short(name: str) -> str:
    return name.partition("/")[2]
