# SPDX-License-Identifier: Apache-2.0
"""Options of making videos, from the flags of programs to the sampler: fields of classes (`command_line`)."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cosmos_predict2.actions.transforms import COMBINATIONS, ActionTransform
from cosmos_predict2.released import not_yet_here
from imaginaire.command_line import above_zero, at_least, flag
from imaginaire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that all requests of a run share."""

    # away from the negative prompt, or without one from no text; at 0 the network runs once a step
    guidance: float = flag(0.0, "x = cond + guidance (cond - uncond), away from the negative prompt; 0: none")
    num_steps: int = flag(35, "sampling steps", type=at_least(1, 10_000))
    solver: str | None = flag(None, "default: that of the model's objective, 2ab, or unipc of Predict2.5")
    # Evaluate once more at the lowest noise level, where that is above 0; without it, num_steps 1 is one evaluation.
    final_evaluation: bool = True
    # Below 1 a whole given video is edited: noised to the level from which so large a share of the steps is left.
    strength: float = 1.0
    use_cuda_graphs: bool = flag(False, "capture the network's forward pass")
    compile_network: bool = flag(False, "compile the network's blocks: up to a minute at first, then faster")
    progress: bool = False  # show a bar
    is_repeatable: bool = False  # whatever memory is free: of training, whose later part must compute as the whole does

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise ConfigError(
                f"The strength of an edit is {self.strength:g}: it is above 0, which leaves no step, to 1."
            )

    def record(self) -> dict[str, Any]:
        """The options that change or describe a result, as plain values."""
        usual = {"final_evaluation": True, "strength": 1.0, "compile_network": False}
        left_out = {"progress", "is_repeatable", *(key for key in usual if getattr(self, key) == usual[key])}
        return {key: value for key, value in asdict(self).items() if key not in left_out}


UNGUIDED = SamplingOptions()
GUIDED = SamplingOptions(guidance=7.0)  # the published scale, for prompts
LoadActions = Callable[[dict[str, Any], str, Any], dict[str, Any]]


def _model_name(text: str) -> str:
    if why := not_yet_here(text):
        raise argparse.ArgumentTypeError(why)
    if text.endswith("action-cond"):
        raise argparse.ArgumentTypeError(f"{text} takes actions: run it with examples/action_conditioned.py")
    return text


def _combinations(text: str) -> str | list[str]:
    if unknown := [word for word in text.split(",") if word not in COMBINATIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(COMBINATIONS)}")
    return text.split(",") if "," in text else text


# The model ------------------------------------------------------------------------------------------------------------

_SIZE = "default 2B, or that of the run that --dit_path lies in; tiny: the toy world, on any CPU, no download"


@dataclass(frozen=True, kw_only=True)
class Model:
    """The weights of a model; what no flag sets is as their card records it."""

    model_size: str | None = flag(None, _SIZE, type=_model_name, choices=["2B", "14B", "tiny"])
    dit_path: str = flag(
        "",
        "weights in place of the released ones: a .pt or safetensors file, a run or diffusers folder, a hub id",
        metavar="PATH",
    )
    load_ema: bool = flag(False, "take the averaged weights (net_ema.) of the file")
    lora: list[str] = flag(  # noqa: RUF009
        [], "an adapter to add; may be repeated", action="append", metavar="PATH[:WEIGHT]"
    )
    tokenizer_path: str = flag(
        "", "where the video tokenizer's file lies (default: where the run had it, or the downloads)", metavar="FILE"
    )
    checkpoint_dir: str | None = flag(
        None, "where released weights lie (default checkpoints, or COSMOS_PREDICT2_ARGS)", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class VideoModel(Model):
    """A Video2World model, of Predict2 or Predict2.5."""

    model: str | None = flag(
        None,
        "a released model of Predict2.5, in place of Predict2; weights of one in --dit_path are recognised",
        type=_model_name,
        choices=["2B/pre-trained", "2B/post-trained", "2B/distilled", "14B/pre-trained", "14B/post-trained"],
    )
    resolution: str | None = flag(None, "default 720, or the run's; tiny: 48", choices=["480", "720", "48"])
    aspect_ratio: str | None = flag(
        None, "default 16:9, or the run's; tiny: 1:1", choices=["1:1", "4:3", "3:4", "16:9", "9:16"]
    )
    fps: float | None = flag(
        None,
        "frames per second: default 16 (93 frames; Predict2.5: 77), or those of the run's clips; 10: the released"
        " weights for 61 frames; tiny: 10; any other is the rate of the mp4",
        type=above_zero,
        metavar="RATE",
    )
    num_frames: int | None = flag(
        None, "frames of the video, 1 + 4k, in place of those of the model", type=at_least(1, 10**5), metavar="N"
    )
    random_weights: bool = flag(False, "no weights: what is generated is noise")
    natten: bool = flag(False, "the weights of the sparse variant (720, 16:9), run with dense attention")


@dataclass(frozen=True, kw_only=True)
class ActionModel(Model):
    model_size: str | None = flag(None, _SIZE, choices=["2B", "tiny"])
    action_transform: str = flag(
        "",
        "what the weights were trained with, where they do not say: relative_pose:20, controller:20x7, or JSON"
        " {kind, scale, offset}",
        metavar="NAME",
    )
    action_scaler: float | None = flag(None, "relative_pose with this scale (default 20)", type=float)
    gripper_scale: float | None = flag(None, "relative_pose with this scale of the gripper (default 1)", type=float)
    use_quat: bool = flag(False, "relative_pose with quaternions: 8 numbers per action")
    chunk_size: int | None = flag(None, "actions of a chunk (default 12, or the run's)", type=int)
    given_timestep: float | None = flag(
        None,
        "the timestep of conditioning frames for Predict2.5 weights, 0 to 1000: 0.1 where they were trained so"
        " (default: the run's, else that of the other frames)",
        type=float,
        metavar="T",
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device of a model, its precision, and the processes that share it."""

    device: str | None = flag(None, "cpu, cuda, cuda:1 (default: a GPU where there is one)")
    dtype: str | None = flag(
        None, "of the network (default bfloat16 on a GPU, float32 on a CPU)", choices=["bfloat16", "float16", "float32"]
    )
    num_gpus: int = flag(1, "processes that share a video; more than one: torchrun", type=at_least(1))
    offload_tokenizer: bool = flag(False, "keep the video tokenizer in host memory between uses")


# Videos ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VideoForm:
    """Size and length of a video, where they are not the model's.

    One that is longer than ``chunk_frames`` is made chunk by chunk: each begins with the last ``overlap`` frames of the
    one before, as they were decoded, and its noise has the next seed.
    """

    size: tuple[int, int] | None = None  # (height, width)
    num_frames: int | None = None  # None: those of a chunk
    chunk_frames: int | None = None  # made at once; None: the model's
    overlap: int | None = None  # None: as many as the first chunk is conditioned on
    num_views: int = 1  # of a multi-view model, all of ``size``
    given_view: int | None = None  # the one that is given whole, of the edited clip

    def num_chunks(self, chunk_frames: int, overlap: int) -> int:
        """The chunks that make at least ``num_frames``."""
        further = max(0, (self.num_frames or 0) - chunk_frames)
        if further and not overlap:
            raise ConfigError(
                f"A video of {self.num_frames} frames is made in chunks of {chunk_frames}, which overlap by 1 or 5"
                " frames: give --num_conditional_frames, or chunk_overlap."
            )
        return 1 - (-further // (chunk_frames - overlap))


OF_MODEL = VideoForm()


@dataclass(frozen=True)
class VideoRequest:
    """One video to make."""

    input_path: str = flag("", "a picture, or an mp4 whose last frames are continued", metavar="FILE")
    prompt: str = flag("", "what should happen")
    save_path: str = flag(
        "output/generated_video.mp4", "the mp4; a .txt and a .json beside it record how it was made", metavar="FILE"
    )
    negative_prompt: str = flag("", "what guidance leads away from")
    num_conditional_frames: int = flag(
        1,
        "frames of the input that the video begins with (default 1); 5 needs a clip, 0 none (Predict2.5 only)",
        choices=[0, 1, 5],
    )
    seed: int = flag(0, "of the initial noise: equal seeds give equal videos")
    compare_to: str = flag(
        "",
        "a true clip to show above the generated one on the contact sheet: the input itself from the frame that was"
        " taken of it, another one from its first",
        metavar="FILE",
    )
    start_frame_idx: int | None = flag(
        None,
        "begin with frame N of the input clip, 0 for its first, in place of its last frames",
        type=int,
        metavar="N",
    )
    form: VideoForm = OF_MODEL
    edited_path: str = ""  # a clip from which sampling begins, noised by SamplingOptions.strength, in place of noise
    edited_start: int = 0  # its first frame


@dataclass(frozen=True)
class Settings:
    """Settings that all videos of a run of the program share; recorded beside every result."""

    aspect_ratio: str
    fps: float
    weights: str  # path and fingerprint of the network's weights
    sampling: SamplingOptions
    contact_sheet: bool = flag(False, "also write frames of the video as one picture, a .png beside it")

    def record(self) -> dict[str, Any]:
        """All of it as plain values, those of sampling among them."""
        return {key: value for key, value in asdict(self).items() if key != "sampling"} | self.sampling.record()


# Rollouts of actions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RequestText:
    """The text of an action-conditioned model; most have none."""

    prompt: str = flag("", "a text, for weights that were trained with one")
    negative_prompt: str = flag("", "what guidance leads away from")
    prompt_embeddings: str | None = flag(
        None, "embeddings written by scripts.encode_prompts, or a .pt of the empty prompt's", metavar="FILE"
    )


@dataclass(frozen=True)
class Reading:
    """Settings by which a run of the program reads its recordings."""

    transform: ActionTransform
    chunk_size: int = 12
    camera: int = flag(0, "which of an annotation's videos", name="camera_id")
    start: int = flag(0, "the frame of the recording to begin with", name="start_frame_idx")
    stride: int = flag(1, "take every so many frames of the recording", name="fps_downsample_ratio")
    combine: str | Sequence[str] | None = flag(
        None,
        "what becomes of the actions in between: sum for moves, last (or first) for absolute targets, or with commas a"
        " word for each number (default: the run's, or a LeRobot data set's; of an annotation's rows: sum)",
        name="combine_actions",
        type=_combinations,
        metavar="WORD",
    )
    source: str = flag(
        "auto",
        "state: computed from the poses, as in training; action: as recorded; auto: state where it can be",
        name="action_source",
        choices=["auto", "state", "action"],
    )
    state_key: str = flag("state", "the poses' name in the annotation")
    gripper_key: str = flag("continuous_gripper_state", "the gripper states' name")
    # empty: the first of ACTION_KEYS whose rows have as many numbers as the transform
    action_key: str = flag(
        "",
        "the actions' name (default: action, actions or toy_actions); of a LeRobot data set the run's, or names with"
        " commas between them",
    )
    num_given: int = 1  # frames that a rollout begins with
    most_actions: int | None = None
    size: tuple[int, int] | None = None  # (height, width); None: of the video
    fps: float = 10.0  # of a rollout that begins with a picture
    load: LoadActions | None = None  # in place of all this: scaled actions and a first frame from code of one's own
    arguments: Any = None  # what that code is given

    def check(self) -> None:
        """Raise for values out of range."""
        if self.stride < 1 or self.start < 0:
            raise ConfigError(
                f"--fps_downsample_ratio {self.stride} --start_frame_idx {self.start}: at least 1, and at least 0."
            )
        if self.size is not None and (min(self.size) < 16 or any(side % 16 for side in self.size)):
            raise ConfigError(f"--resolution {self.size[0]},{self.size[1]}: height and width are multiples of 16.")
        if self.source == "state" and self.transform.kind != "relative_pose":
            raise ConfigError(f"--action_source state: this model's actions are {self.transform}. Use action.")


@dataclass(frozen=True)
class RolloutSettings:
    """Settings that all rollouts of a run of the program share; recorded beside every result."""

    save_fps: float | None = flag(
        None, "of the mp4 (default: that of the frames taken of the recording; of a picture the run's)", type=above_zero
    )
    weights: str = ""  # path and fingerprint
    sampling: SamplingOptions = UNGUIDED
    history: int = 1
    reference: bool = flag(
        False,
        "with --num_conditional_frames 5: the first picture stays the first of the five; needs training for it",
        name="keep_reference",
    )
    float_hand_over: bool = flag(False, "chunks hand on frames as decoded, not rounded to bytes")
    last_chunk: str = flag("pad", "actions that fill no chunk: filled, left out", choices=["pad", "drop"])
    batch_size: int = flag(16, "recordings that are imagined together; changes no result", type=at_least(1))
    side_by_side: bool = flag(False, "also write NAME_side_by_side.mp4: true on the left")
    contact_sheet: bool = flag(False, "also write frames of both as one picture, NAME.png")
    other_flags: Mapping[str, Any] = field(default_factory=dict)  # further flags of a program, for the record alone
