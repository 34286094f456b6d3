# SPDX-License-Identifier: Apache-2.0
"""One page about a way from recordings to a policy: its verdict, the ladder with a figure and a picture each, what it
cost, and what to do next. It is written after every step, so that it shows what there is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_predict2.evaluation.reports.evaluation_page import Page, PageVideo
from cosmos_predict2.evaluation.reports.run_report import by_name, plots_of, read_records
from cosmos_predict2.rl.imagined.verdict import lines_of, table
from cosmos_predict2.tools.improve import phases
from cosmos_predict2.tools.improve.phases import Options, Phase, chosen, clones_of
from cosmos_predict2.tools.improve.results import WayResults, number
from cosmos_predict2.tools.improve.steps import DONE
from imaginaire import storage
from imaginaire.log import duration

MOST_CLIPS = 4
BOUNDS = ("rate", "low", "high")
# The metrics of runs that are drawn together.
LOOKS = {"Loss": ("val/stop_loss", "val/stop_loss_seen"), "Imagined pictures, dB": ("val/stop_psnr",)}
LEARNING = {
    "Imagined: reward and success": ("train/reward_mean", "train/success", "val/imagined_greedy_success"),
    "Change from update to update": ("train/approx_kl",),
}


def _ladder(results: WayResults) -> Iterator[tuple[str, str, str, str]]:
    """A tile for each rung that there is: name, figure, what it is, and whether it is good."""
    if split := results.read("split.json"):
        known = [outcome for outcome in split["outcomes"] if outcome is not None]
        yield "recordings", str(len(split["outcomes"])), f"{sum(known)} succeed, {len(known) - sum(known)} fail", ""
    if results.options.world_model is None and (found := results.read("tokenizer.json")):
        kind = {"good": "good", "bad": "bad"}.get(found["verdict"], "")
        verdict = f"{found['verdict']}; the shipped one {found['psnr_of_shipped']:.1f}"
        yield "tokenizer", f"{found['psnr']:.1f} dB", verdict, kind
    if found := results.read("imagined/figures.json"):
        word = found["verdict"]["word"]
        yield "world model", word, "its actions", {"follows": "good", "ignores": "bad"}.get(word, "")
    if found := results.clone_verdict(chosen(results.options).name):
        sees = "hardly sees" if found["next_step"] else "sees"
        word = {True: sees, False: "blind"}.get(found["is_better"], "not known")
        yield "clone", word, "held-out actions", {"sees": "good", "blind": "bad"}.get(word, "")
    for phase in results.phases:
        if found := results.card(phase):
            kind = {"go": "good", "no": "bad"}.get(found["verdict"], "")
            yield f"gate{phase.title}", found["verdict"], "is what it imagines to be trusted?", kind
    played = {f"after{phase.end}": f"policy{phase.title}, truly" for phase in results.phases}
    clones = {"before": "first clone, truly", results.truth_of(chosen(results.options)): "clone, truly"}
    for name, title in {**clones, **played}.items():
        if found := results.success(name):
            yield title, f"{found['rate']:.3f}", f"{found['low']:.3f} to {found['high']:.3f} of {found['episodes']}", ""


def _recordings(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    page.heading("1. Recordings", f"{counts}; {len(found['faults']) or 'no'} faults.")
    if split := results.read("split.json"):
        outcomes = {part: [split["outcomes"][i] for i in split[part]] for part in ("train", "calibrate", "test")}
        page.findings([f"{part}: {o.count(True)} succeed, {o.count(False)} fail" for part, o in outcomes.items()])
        page.note("What is held out (calibrate, test) is seen by no training; test by no threshold and no stop rule.")
    page.clips(_illustrations(results, "split"))


def _tokenizer(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    here, shipped = f"{found['psnr']:.1f} dB", f"{found['psnr_of_shipped']:.1f}"
    figures = f"{here} on held-out ones, where the tokenizer that ships has {shipped}"
    page.heading("2. Tokenizer", f"Fitted to these pictures, it is {found['verdict']}: {figures}.")
    page.findings(found["reasons"])
    page.clips(_illustrations(results, "tokenizer"))


def _world_model(page: Page, results: WayResults, rule: dict[str, Any]) -> None:
    page.heading("3. World model", rule["text"])
    _plots(page, results.options.out / phases.WORLD_MODEL, LOOKS)
    _imagined(page, results)


def _given_world_model(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    page.heading("3. World model", f"A given one: {results.options.world_model}.")
    _imagined(page, results)


def _imagined(page: Page, results: WayResults) -> None:
    if found := results.read("imagined/figures.json"):
        page.verdict(f"It {found['verdict']['sentence']}.")
        chunks = {name: values for name, values in found.get("by_chunk", {}).items() if name.startswith("PSNR")}
        page.findings([f"{name}, by chunk: {', '.join(f'{one:.1f}' for one in each)}" for name, each in chunks.items()])
        page.clips(_clips(results.options.out, "imagined", "clip_*.mp4"))
        page.note("Held-out recordings, and what is imagined of their first picture and their own actions.")
        page.link("its evaluation, with all figures and videos", "imagined/index.html")


def _reward(page: Page, results: WayResults, found: dict[str, Any]) -> None:
    page.heading("4. Reward", "A success classifier of pictures; figures of held-out recordings.")
    columns = ("precision", "recall", "accuracy", "calibration_error")
    rows = [(name, [number(one.get(key)) for key in columns]) for name, one in found["quality"].items()]
    page.table("pictures", [name.replace("_", " ") for name in columns], rows)
    bins = {name: [(bin["probability"], bin["rate"]) for bin in one["bins"]] for name, one in found["quality"].items()}
    page.plots({"Share of true successes": {**bins, "as it should be": [(0, 0), (1, 1)]}}, "probability")


def _clone(page: Page, results: WayResults) -> None:
    options, learns = results.options, chosen(results.options)
    found = {clone: results.read(f"{phases.CLONED}/{clone.name}/clone.json") for clone in clones_of(options)}
    if not found[learns]:
        return
    verdict = results.clone_verdict(learns.name)
    page.heading("5. Clone", f"{verdict['text']} {verdict['next_step']}".rstrip())
    losses = {
        clone.title: [(one["iteration"], number(one["loss"])) for one in content["history"]]
        for clone, content in found.items()
        if content
    }
    page.plots({"Held-out loss": losses}, "iteration")
    if len(found) > 1 and (ranking := results.read(phases.RANKING)):
        ranked = {Path(row["policy"]).parent.name.replace("_", " "): row for row in ranking["policies"]}
        columns, is_played = ("value", "low", "high"), all(row.get("true_success") for row in ranked.values())
        for kind, title in (("value", "imagined"), *([("true_success", "true success")] if is_played else [])):
            rows = [(name, [number(row[kind][key]) for key in columns]) for name, row in ranked.items()]
            page.table(title, columns, rows)
        why = "it truly succeeds most" if is_played else "it has the highest imagined value"
        page.verdict(f"{learns.title}, learns: {why}.")
    _truth(page, results, results.truth_of(learns))


def _gate(page: Page, phase: Phase, card: dict[str, Any]) -> None:
    page.heading(f"6. Gate{phase.title}", f"Is what is imagined to be trusted? {card['verdict']}.")
    page.findings(card["reasons"])
    figures = card["figures"]
    by_policy = {name: figures[name] for name in figures if name.partition("/")[0] == "policy"}
    page.text(table(list(lines_of(figures, by_policy, figures.get("allowed", ())))))
    page.note(f"Next, says the gate: {card['next_step']}")


def _policy(page: Page, results: WayResults, phase: Phase) -> None:
    page.heading(f"7. Policy{phase.title}", "It learnt in what the world model imagines.")
    _plots(page, phase.run, LEARNING)
    page.note(f"What was measured: {results.risen(phase)}.")
    if (kept := results.kept(phase)) is not None:
        words = f"What it learnt is {'not kept' if kept == phase.policy else 'kept'}"
        page.verdict(f"{words}: {results.tried(phase)}.")
        names = [name for name in (*phase.trials_before, phase.trial_after) if results.is_done(name)]
        if rows := [(name.replace("_", " "), [results.success(name)[key] for key in BOUNDS]) for name in names]:
            page.table("true success, trials", list(BOUNDS), rows)
    looks = [(i, phase.look(i)) for i in phase.saved_at if results.is_done(phase.look(i))]
    if rows := [(f"iteration {i}", [results.success(name)[key] for key in BOUNDS]) for i, name in looks]:
        page.table("true success while it learnt, from other starts", list(BOUNDS), rows)
        page.note(f"Iteration {phase.best} is tried: the last one within a standard error of the best.")
    if not results.is_dropped(phase):
        _truth(page, results, f"after{phase.end}")


def _truth(page: Page, results: WayResults, name: str) -> None:
    """The success and the episodes of an evaluation, where there is one."""
    if found := results.success(name):
        interval = f"({found['low']:.3f} to {found['high']:.3f})"
        page.verdict(f"It truly succeeds on {found['rate']:.3f} of {found['episodes']} episodes {interval}.")
        page.clips(_clips(results.options.out, name, "*.mp4"))
        page.note("Left as it truly goes, right what is imagined of the same actions.")


_OWN = {"tokenizer.json": _tokenizer, f"{phases.WORLD_MODEL}/stop_rule.json": _world_model}
_GIVEN = {"imagined/figures.json": _given_world_model}


def _rungs(options: Options) -> dict[str, Callable[[Page, WayResults, dict[str, Any]], None]]:
    """The parts of the page by the files that they are made of."""
    world = _GIVEN if options.world_model else _OWN
    return {"recordings.json": _recordings, **world, "reward/quality.json": _reward}


def _clips(out: Path, folder: str, pattern: str) -> list[PageVideo]:
    """The first videos of a step, named as their files are, true ones before imagined ones."""
    files = sorted((out / folder).glob(pattern), key=lambda file: file.stem.replace("_imagined", "_with"))
    names = {file: file.stem.replace("_", " ").replace("--", ", ") for file in files[:MOST_CLIPS]}
    return [PageVideo(name, f"{folder}/{file.name}") for file, name in names.items()]


def _illustrations(results: WayResults, name: str) -> list[PageVideo]:
    """The clips that `improve.illustrate` wrote for a step."""
    captions = results.read("page/captions.json").get(name, {})
    return [PageVideo(caption, f"page/{file}") for file, caption in captions.items()]


def _plots(page: Page, run: Path, table: Mapping[str, Sequence[str]]) -> None:
    page.plots(plots_of(by_name(read_records(str(run))), table), "iteration")


def write_page(results: WayResults) -> Path:
    """Write RUN/index.html and RUN/verdict.json; gives the page."""
    options, runner, found = results.options, results.runner, results.verdict()
    title = f"From {options.data.name} to a policy" + (f", {options.suite}" if options.suite else "")
    markers = [(step.title, runner.marker(step)) for step in runner.steps]
    done = [(title, marker) for title, marker in markers if marker.get("state") == DONE]
    costs = [(title, [marker["seconds"] / 60, marker["processor_seconds"] / 60]) for title, marker in done]
    minutes, used = (sum(cost[k] for _, cost in costs) for k in range(2))
    facts = [
        f"{len(costs)} of {len(markers)} steps done, in {duration(60 * minutes)}; {used:.1f} processor minutes",
        f"recordings: {options.data}; policy: {', '.join(options.policies)}; seed {options.seed}",
    ]
    page = Page(title, facts, video_width=192)
    page.verdict(found.sentence)
    page.findings(found.notes)
    page.verdict(f"Next: {found.next_step}")
    page.tiles(list(_ladder(results)))
    for file, draw in _rungs(options).items():
        if content := results.read(file):
            draw(page, results, content)
    _clone(page, results)
    for phase in results.phases:
        if card := results.card(phase):
            _gate(page, phase, card)
    for phase in results.phases:
        if results.lines(phase):
            _policy(page, results, phase)
    page.heading("What it cost", "Minutes by the clock, and of all processors together.")
    page.table("step", ["minutes", "processor minutes"], [*costs, ("all", [minutes, used])])
    page.heading("Commands", "Each step can be run alone.")
    page.text("\n".join(runner.command(step) for step in runner.steps))
    content = {"verdict": found.word, "sentence": found.sentence, "notes": found.notes, "next": found.next_step}
    storage.write_json(options.out / "verdict.json", content)
    return page.write(options.out)
