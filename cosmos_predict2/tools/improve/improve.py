# SPDX-License-Identifier: Apache-2.0
"""Go the way: look at the inputs, run the steps that are to be done, learn nothing where the gate refuses, write the
page, and the clips of it that no program of the way writes: RUN/page/NAME.mp4, and captions.json with their captions.
"""

import logging
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from cosmos_predict2.data.lerobot.info import STATE, read_info
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import read_split
from cosmos_predict2.data.video.media import resize_and_crop
from cosmos_predict2.data.views import require_same, views_of
from cosmos_predict2.evaluation.reports.evaluation_page import written
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.replays import require_actions
from cosmos_predict2.rl.episodes.episodes import require_known_sentences, require_shape, require_views
from cosmos_predict2.rl.episodes.recording import CAMERA, require_columns
from cosmos_predict2.rl.policies.cloning import CloneStart, begin, cloneable
from cosmos_predict2.rl.policies.cloning_model import CloningConfig
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from cosmos_predict2.tokenizers.tiny import GROUP, TinyTokenizer
from cosmos_predict2.tools.improve.page import write_page
from cosmos_predict2.tools.improve.phases import Options, RecordedSizes, look
from cosmos_predict2.tools.improve.results import WayResults, WayVerdict
from cosmos_predict2.tools.improve.steps import Runner, digest
from cosmos_predict2.tools.improve.way import POLICIES, steps_of
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import foreign_json, storage
from imaginaire.errors import ConfigError, DataError, raised_as

log = logging.getLogger(__name__)

CHUNK = 12  # actions of a window of a world model
NUM_SHOWN = 2  # recordings of either outcome
MOST_LOOKED_AT = 100  # recordings, about, whose actions show their unit
MOST_BEYOND = 0.01  # share of numbers beyond -1 and 1 that clipping may explain (a guess)


def improve(options: Options) -> WayVerdict:
    """Go as far as the gate lets; the verdict of what there is then."""
    recorded = looked_at(options)
    with Runner(options.out, steps_of(options, recorded)) as runner:
        done = 0
        while done < len(runner.steps):
            step = runner.steps[done]
            done += 1
            results = WayResults(options, runner)
            runner.left_out = results.left_out()
            try:
                if runner.run(step):
                    if step.name in ("split", "tokenizer"):
                        illustrate(step.name, options, recorded)
                    elif step.name.startswith("clone") and (clone := results.clone_verdict(step.name)):
                        print(f"    | {clone['text']} {clone['next_step']}".rstrip(), file=runner.shown)
                runner.steps = steps_of(options, recorded)  # what learns may be known now
                keep(WayResults(options, runner))
            finally:
                page = write_page(WayResults(options, runner))
    found = WayResults(options, runner).verdict()
    lines = [f"\n{found.sentence}", *(f"- {note}" for note in found.notes), f"Next: {found.next_step}", f"page: {page}"]
    print("\n".join(lines), file=runner.shown)
    return found


def looked_at(options: Options) -> RecordedSizes:
    """The sizes that the recordings decide. Raises where recordings, policies and suite do not fit each other."""
    for policy in options.policies:
        if policy not in POLICIES:
            cloneable(policy)
    recorded = look(options)
    if recorded.num_actions < CHUNK:
        why = f"has {recorded.num_actions + 1} frames, and a world model learns from windows of {CHUNK + 1}"
        raise DataError(f"{options.data}: the longest episode {why}. Record longer ones, or more frames per second.")
    for policy in options.policies:
        if policy not in POLICIES:
            require_policy(policy, options)
    if options.suite:
        require_suite(options, recorded)
    return recorded


def keep(results: WayResults) -> None:
    """Copy what each phase ends with to its result, as far as that is known."""
    for phase in results.phases[:1] if results.is_full else results.phases:
        is_clone = results.is_full or phase in results.refused
        policy = phase.policy if is_clone else results.kept(phase)
        if policy is not None and digest(phase.result) != digest(policy):
            shutil.rmtree(phase.result, ignore_errors=True)
            shutil.copytree(policy, phase.result)


def commands(options: Options) -> list[str]:
    """The commands that would be started, as a user would type them."""
    steps = steps_of(options, looked_at(options))
    runner = Runner(options.out, steps)
    return [runner.command(step) for step in steps]


def require_policy(policy: str, options: Options) -> None:
    """Begin a clone of a policy of the user's, so that a misfit with the recordings is reported before anything is
    trained."""
    data = RecordedWindows(
        str(options.data),
        num=MOST_LOOKED_AT,
        chunk=CHUNK,
        camera=options.camera or None,
        action_keys=options.action_keys or None,
        held_out_share=0.0,
        state=options.state,
    )
    with tempfile.TemporaryDirectory() as folder:
        start = CloneStart(data.windows, Path(folder), options.seed, CHUNK, CHUNK)
        begin(policy, start, {}, f"--policy {policy}: ", **CloningConfig().draws)


def require_world_model(options: Options, config: Video2WorldActionPipelineConfig, views: Sequence[str]) -> None:
    """Refuse a world model of the user's that was not made for these recordings, before anything is trained."""
    with raised_as(ConfigError, f"--world_model {options.world_model}", DataError, ConfigError):
        require_actions(LeRobotSource.open(options.data, options.action_keys), config)
        require_same(views, views_of(options.camera), "It", "--camera", "give its cameras.")
        if options.state and not config.state:
            raise ConfigError("It predicts no state (model.config.pipe_config.state): leave --state out.")


def require_suite(options: Options, recorded: RecordedSizes) -> None:
    """Build one place of the suite, so that a misfit with the recordings is reported before anything is trained."""
    policy: Any = SimpleNamespace(action_dim=recorded.action_dim, chunk=1, sentences=recorded.sentences)
    try:
        env = suites.find(options.suite).env(1, policy)
    except ConfigError as error:
        about = f"for actions of {recorded.action_dim} numbers, as recorded"
        raise ConfigError(f"--suite {options.suite}, {about}: {error}") from error
    try:
        require_known_sentences(recorded.sentences, env.reset()[0])
        require_shape(f"--suite {options.suite}", recorded.recorded_size, env.reset()[0])
        require_views(f"--camera {options.camera}", views_of(recorded.camera), env.reset()[0])
        if options.state and (width := env.reset()[0]["state"].shape[1]) != recorded.state_dim:
            raise ConfigError(
                f"--state: the recordings have {recorded.state_dim} numbers of the robot's state ({STATE}), but --suite"
                f" {options.suite} shows {width}: choose its entries (gym:ID?state=KEY), or leave --state out."
            )
        if options.phases:  # they add episodes to the recordings
            names, what = read_info(Path(options.data)).features, f"--phases {options.phases}: {options.data}"
            require_columns(names, env.reset()[0], recorded.camera or CAMERA, what)
        most = env.metadata["max_steps"]
        if most != recorded.num_actions:
            lengths = f"has at most {most} actions, the longest recording {recorded.num_actions}"
            later = "later success is " + ("not imagined" if most > recorded.num_actions else "imagined, and not true")
            cure = f"Let both be as long: gym:ID?max_steps={recorded.num_actions}"
            cure += "; if the recordings hold each action for K steps of the environment, &repeat=K, too"
            log.warning("an episode of %s %s: %s. %s.", options.suite, lengths, later, cure)
        if "scaled_low" in env.metadata:
            require_unit(options, env.metadata["scaled_low"], env.metadata["scaled_high"])
    finally:
        env.close()


def require_unit(options: Options, low: Sequence[float], high: Sequence[float]) -> None:
    """Refuse recordings that go beyond [-1, 1], which the environment scales to ``low`` and ``high``."""
    is_same = all(end == -1 for end in low) and all(end == 1 for end in high)
    source = LeRobotSource.open(options.data, options.action_keys)
    parts, looked_at = source.action_parts(), range(0, len(source), max(1, len(source) // MOST_LOOKED_AT))
    actions = numpy.concatenate([source.parts(i, parts) for i in looked_at])
    scaled = f"actions from -1 to 1 are scaled to those from {min(low):.4g} to {max(high):.4g} of the environment"
    about = "actions beyond -1 and 1 are clipped" if is_same else scaled
    about += f", and the recorded ones go from {actions.min():.4g} to {actions.max():.4g}"
    word = "&" if "?" in options.suite else "?"
    if (abs(actions) > 1).mean() > MOST_BEYOND:
        native = f"If they are in its unit, write '{options.suite}{word}actions=native'; else record"
        raise ConfigError(f"--suite {options.suite}: {about}. {'Record' if is_same else native} them from -1 to 1.")
    if is_same:
        return  # both units are the same
    log.warning("%s: %s; if that is its own unit, %sactions=native is missing", options.suite, about, word)


@torch.no_grad()
def illustrate(step: str, options: Options, recorded: RecordedSizes) -> None:
    """Held-out recordings with their outcomes, or behind the tokenizer true ones beside what comes back."""
    source, split = LeRobotSource.open(options.data), read_split(options.out / "split.json")
    camera, fit = source.camera(options.camera or None), partial(resize_and_crop, size=recorded.size)
    tokenizer = TinyTokenizer(str(options.out / "tokenizer.safetensors")) if step == "tokenizer" else None
    folder, captions = options.out / "page", {}
    folder.mkdir(exist_ok=True)
    for outcome, word in ((True, "succeeds"), (False, "fails")):
        for i in [i for i in split.held_out if split.outcomes[i] is outcome][:NUM_SHOWN]:
            video = source.frames(i, camera, range(split.lengths[i]), fit=fit)
            name, caption = f"{i}_recorded", f"recording {i}, {word}"
            if tokenizer is not None:  # of whole groups of frames
                video = video[:, : (video.shape[1] - 1) // GROUP * GROUP + 1]
                back = to_uint8(tokenizer.decode(tokenizer.encode(video[None].float() / 127.5 - 1)))[0]
                video = torch.cat([video, back], dim=-1)
                name, caption = f"{i}_round_trip", f"recording {i}: true, and back from latents"
            captions[written(folder, name, caption, video, recorded.fps).file] = caption
    path = folder / "captions.json"
    known = foreign_json.load_object(path) if path.exists() else {}
    storage.write_json(path, {**known, step: captions})
