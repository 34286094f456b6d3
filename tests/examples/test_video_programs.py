# SPDX-License-Identifier: Apache-2.0
"""Programs that make videos in other ways than examples/video2world.py, which they share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.configs.base.config_text2image import get_cosmos_predict2_text2image_pipeline
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.released import SIZES, TINY_TEXT2IMAGE, TINY_VIDEO2WORLD
from cosmos_predict2.toy_world.rendering import detect
from cosmos_predict2.world_model.assembly import network_of
from cosmos_predict2.world_model.options import VideoRequest
from examples import (
    text2image,
    text2world,
    video2video_sdedit,
    video2world,
    video2world_bestofn,
    video2world_gr00t,
    video2world_lora,
    video2world_lvg,
)
from imaginaire.checkpoint import weights
from imaginaire.optim import lora
from tests.examples.records import frames_of, record_of
from tests.programs import exit_code, finished, warm_python

ROOT = Path(__file__).parents[2]
PROMPT = "push the red puck to the green ring"
TINY = ["--model_size", "tiny", "--prompt", PROMPT, "--num_steps", "3"]
CLIP = str(ROOT / "assets/toy_world/clip.mp4")


def read(program: Any, *arguments: str) -> Any:
    return video2world.parse(arguments, program.main.keywords["program"])


def batch_of(tmp_path: Path, *entries: dict[str, Any]) -> str:
    (tmp_path / "batch.json").write_text(json.dumps(entries))
    return str(tmp_path / "batch.json")


# Long videos ----------------------------------------------------------------------------------------------------------


def test_a_long_video_is_its_chunks_and_a_batch_makes_the_same(tmp_path: Path) -> None:
    picture = str(ROOT / "assets/toy_world/first_frame.png")
    paths = {name: tmp_path / f"{name}.mp4" for name in ("plain", "one", "three", "many")}
    plain = frames_of(paths["plain"], video2world.main, *TINY)
    assert frames_of(paths["one"], video2world_lvg.main, *TINY, "--num_chunks", "1") == plain
    three = frames_of(paths["three"], video2world_lvg.main, *TINY, "--num_chunks", "3")
    assert media.probe_video(paths["three"]).num_frames == 13 + 2 * 12
    entry = {"input_video": picture, "prompt": PROMPT, "output_video": str(paths["many"])}
    arguments = ["--batch_input_json", batch_of(tmp_path, entry, {**entry, "output_video": str(tmp_path / "b.mp4")})]
    assert video2world_lvg.main([*TINY, "--num_chunks", "3", *arguments]) == 0
    assert frames_of(paths["many"]) == three


@pytest.mark.slow
def test_two_processes_make_the_long_video_of_one(tmp_path: Path) -> None:
    arguments = [*TINY, "--num_chunks", "2", "--save_path"]
    assert video2world_lvg.main([*arguments, str(tmp_path / "one.mp4")]) == 0
    torchrun = [str(Path(warm_python()).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]
    program = [str(ROOT / "examples/video2world_lvg.py"), "--num_gpus", "2", *arguments, str(tmp_path / "two.mp4")]
    run = finished(*torchrun, *program)
    assert run.returncode == 0, run.stderr
    one, two = (media.read_video(tmp_path / f"{name}.mp4")[0].float() for name in ("one", "two"))
    assert float((one - two).abs().mean()) < 1


def test_five_frames_are_handed_over_where_five_are_given(tmp_path: Path) -> None:
    save_path = str(tmp_path / "long.mp4")
    arguments = [*TINY, "--input_path", CLIP, "--num_conditional_frames", "5", "--num_chunks", "2"]
    assert video2world_lvg.main([*arguments, "--save_path", save_path]) == 0
    assert media.probe_video(save_path).num_frames == 13 + 8


# GR00T ----------------------------------------------------------------------------------------------------------------


def test_prompts_get_the_prefix_once(tmp_path: Path) -> None:
    prefix = video2world_gr00t.PREFIX
    picture = str(ROOT / "assets/toy_world/first_frame.png")
    entries = [
        {"input_video": picture, "prompt": prompt, "output_video": str(tmp_path / f"{i}.mp4")}
        for i, prompt in enumerate(("push it", f"{prefix}push it"))
    ]
    tiny = ["--gr00t_variant", "gr1", *TINY, "--batch_input_json", batch_of(tmp_path, *entries)]
    assert video2world_gr00t.main(tiny) == 0
    assert {record_of(tmp_path / f"{i}.mp4")["prompt"] for i in (0, 1)} == {f"{prefix}push it"}


def test_the_variant_chooses_weights_size_and_resolution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nvidia/Cosmos-Predict2-14B-Sample-GR00T-Dreams-DROID/model-480p-16fps.pt"
    args = read(video2world_gr00t, "--gr00t_variant", "droid", "--checkpoint_dir", str(tmp_path))
    video2world_gr00t.settle(args)
    assert (args.dit_path, args.model_size, args.resolution) == (str(path), "14B", "480")
    assert args.disable_prompt_refiner
    assert video2world_gr00t.main(["--gr00t_variant", "gr1", "--prompt", "x", "--save_path", f"{tmp_path}/a.mp4"]) == 2
    assert "--model_types sample_gr00t_dreams_gr1" in capsys.readouterr().err


# LoRA -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A training checkpoint with adapters, of the tiny model, that records no alpha."""
    from cosmos_predict2.configs.base.config_video2world import TINY_NET

    net = Video2WorldDiT(**TINY_NET)
    weights.load_into(dict(net.state_dict()), weights.read(TINY_VIDEO2WORLD))
    lora.init_adapters(lora.inject(net, 4, 8.0, "q_proj,mlp.layer1"), seed=3, init=False)
    path = str(tmp_path_factory.mktemp("lora") / "iter_000000010.pt")
    torch.save({f"net.{name}": tensor for name, tensor in net.state_dict().items()}, path)
    return path


def test_adapters_without_an_alpha_are_named_and_made_with_the_given_one(
    adapted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--dit_path", adapted]
    assert video2world.main([*arguments, "--save_path", f"{tmp_path}/a.mp4"]) == 2
    assert "video2world_lora.py --use_lora --lora_alpha" in capsys.readouterr().err
    given = ["--lora_alpha", "8", "--lora_rank", "4", "--lora_target_modules", "q_proj,mlp.layer1"]
    arguments.append("--use_lora")
    shas = [frames_of(tmp_path / "b.mp4", video2world_lora.main, *arguments, *flags) for flags in (given, [])]
    assert shas[0] != shas[1], "8 and the published 16 are different videos"


# Best of n ------------------------------------------------------------------------------------------------------------


class Share:
    """A critic that gives the share of bright pixels, and another with every answer where it draws."""

    needs_pixels = True

    def __init__(self, model_path: str = "") -> None:
        self.model_path, self.asked = model_path, 0

    def __call__(self, clips: Any, context: Any) -> torch.Tensor:
        self.asked += 1
        assert clips.video_B_C_F_H_W.dtype == torch.uint8 and context["num_conditional_frames"].tolist() == [1]
        return (clips.video_B_C_F_H_W > 128).float().mean(dim=(1, 2, 3, 4)) + 0.01 * self.asked


CRITIC = f"{__name__}:Share"


def test_videos_of_each_seed_are_ranked_and_can_be_ranked_again(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    arguments = [*TINY, "--seed", "3", "--num_generations", "2", "--save_path", str(folder)]
    assert video2world_bestofn.main([*arguments, "--critic", CRITIC, "--num_critic_trials", "2"]) == 0
    scores = [json.loads(next(folder.glob(f"first_frame_seed{k}_score???.json")).read_text()) for k in (3, 4)]
    assert sorted(one["place"] for one in scores) == [1, 2] and all(len(one["answers"]) == 2 for one in scores)
    assert all(next(folder.glob(f"first_frame_seed{k}_score???.html")) for k in (3, 4))
    videos = {path.name: path.read_bytes() for path in folder.glob("*.mp4")}
    assert set(videos) == {"first_frame_seed3.mp4", "first_frame_seed4.mp4"}
    assert video2world_bestofn.main([*arguments, "--skip_generation"]) == 0  # the toy world's critic: no share
    assert {path.name for path in folder.glob("*_score*.json")} == {f"first_frame_seed{k}_score.json" for k in (3, 4)}
    assert {path.name: path.read_bytes() for path in folder.glob("*.mp4")} == videos
    single = frames_of(tmp_path / "single.mp4", video2world.main, *TINY, "--seed", "4")
    assert single == frames_of(folder / "first_frame_seed4.mp4")


def test_the_best_is_first_by_the_mean_of_what_a_critic_says(tmp_path: Path) -> None:
    made = [VideoRequest("", "push", str(tmp_path / f"{name}.mp4"), num_conditional_frames=5) for name in "ab"]
    for request in made:
        shutil.copy(CLIP, request.save_path)
    said, seen = {"a": iter((0.5, 0.4)), "b": iter((0.3, 0.8))}, []

    class Drawn:
        def submit(self, clips: Any, context: Any, ticket: str) -> str:
            seen.append(context["num_conditional_frames"].item())
            return ticket

        def fetch(self, ticket: str, deadline: float) -> Any:
            value = next(said[Path(ticket.rpartition(":")[0]).stem])
            return SimpleNamespace(value_B=torch.tensor([value]), parts={}, is_valid_B=torch.tensor([True]))

    args: Any = SimpleNamespace(num_critic_trials=2, critic="drawn")
    video2world_bestofn.rank(args, Drawn(), made)  # type: ignore[arg-type]
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("b_score055", "a_score045")]
    assert [(one["place"], round(one["score"], 4)) for one in found] == [(1, 0.55), (2, 0.45)]
    assert {*seen} == {2}, "latent frames are given, 2 of 5 pictures"


# Edits ----------------------------------------------------------------------------------------------------------------


def test_a_clip_is_edited_the_less_the_smaller_the_strength(tmp_path: Path) -> None:
    made, of_video = {}, ["--text2image_edit_strength", "0", "--num_steps", "5"]
    for strength in ("0.2", "0.6", "1"):
        path = tmp_path / f"edit{strength}.mp4"
        flags = ["--input_video_path", CLIP, "--video2world_edit_strength", strength, *of_video]
        assert video2video_sdedit.main([*TINY, *flags, "--save_path", str(path)]) == 0
        made[strength] = media.read_video(path)[0].float()
    true = media.read_video(tmp_path / "edit1_input.mp4")[0].float()
    assert true.shape == made["1"].shape
    errors = [float((one[:, 1:] - true[:, 1:]).abs().mean()) for one in made.values()]
    assert errors[0] < errors[1] < errors[2]
    assert (tmp_path / "edit1_comparison.mp4").exists()
    batch = batch_of(tmp_path, {"prompt": PROMPT, "output_video": str(tmp_path / "many.mp4")})
    flags = ["--input_video_path", CLIP, "--video2world_edit_strength", "0.6", *of_video]
    assert video2video_sdedit.main([*TINY, *flags, "--batch_input_json", batch]) == 0
    assert frames_of(tmp_path / "many.mp4") == frames_of(tmp_path / "edit0.6.mp4")
    plain = ["--input_path", CLIP, "--start_frame_idx", "0", "--num_steps", "5"]
    assert frames_of(tmp_path / "p.mp4", video2world.main, *TINY, *plain) == frames_of(tmp_path / "edit1.mp4")


def test_the_first_frame_is_edited_by_text2image(tmp_path: Path) -> None:
    first = {}
    for strength in ("0", "0.2", "1"):
        path = tmp_path / f"edit{strength}.mp4"
        flags = ["--input_video_path", CLIP, "--start_frame_idx", "3", "--text2image_edit_strength", strength]
        assert video2video_sdedit.main([*TINY, *flags, "--num_steps", "5", "--save_path", str(path)]) == 0
        first[strength] = media.read_video(path)[0][:, 0].float()
    true = media.read_video(tmp_path / "edit0_input.mp4")[0][:, 0].float()
    clip = media.read_video(CLIP)[0].float()
    assert (clip[:, 3] - true).abs().mean() < (clip[:, 0] - true).abs().mean()
    errors = [float((frame - true).abs().mean()) for frame in first.values()]
    assert errors[0] < errors[1] < errors[2]


# What is wrong --------------------------------------------------------------------------------------------------------

GROOT = ["--gr00t_variant", "gr1"]


@pytest.mark.parametrize(
    ("main", "arguments", "text"),
    [
        (video2world_lvg.main, ["--num_chunks", "0"], "--num_chunks"),
        (video2world_lvg.main, ["--num_chunks", "2", "--num_conditional_frames", "0"], "--model 2B/post-trained"),
        (video2world_gr00t.main, [], "--gr00t_variant"),
        (video2world_gr00t.main, ["--gr00t_variant", "panda"], "--gr00t_variant"),
        (video2world_gr00t.main, [*GROOT, "--prompt", ""], "prompt is empty"),
        (video2world_gr00t.main, [*GROOT, "--num_chunks", "2"], "unknown flag --num_chunks"),
        (video2world_lora.main, ["--use_lora"], "--dit_path"),
        (video2world_lora.main, ["--use_lora", "--dit_path", "absent.pt"], "absent.pt"),
        (video2world_lora.main, ["--use_lora", "--dit_path", "ADAPTED", "--lora_rank", "8"], "--lora_rank 8"),
        (video2world_lora.main, ["--use_lora", "--dit_path", "ADAPTED", "--lora_target_modules", "v_proj"], "v_proj"),
        (video2world_bestofn.main, ["--critic", "beauty"], "beauty"),
        (video2world_bestofn.main, ["--save_path", "a.mp4"], "a folder is expected"),
        (video2world_bestofn.main, ["--skip_generation"], "first_frame_seed0.mp4"),
        (video2world_bestofn.main, ["--benchmark"], "--benchmark"),
        (video2video_sdedit.main, ["--video2world_edit_strength", "0"], "strength of an edit is 0"),
        (video2video_sdedit.main, ["--video2world_edit_strength", "1.5"], "strength of an edit is 1.5"),
        (video2video_sdedit.main, ["--input_video_path", "PICTURE"], "13"),
        (video2video_sdedit.main, ["--text2image_edit_strength", "-1"], "strength of an edit is -1"),
        (video2video_sdedit.main, ["--num_conditional_frames", "5"], "--num_conditional_frames 1"),
        (video2video_sdedit.main, ["--input_video_path", CLIP, "--start_frame_idx", "20"], "has 25 frames"),
        (text2image.main, ["--save_path", "a.mp4"], ".mp4"),
        (text2image.main, ["--prompt", ""], "prompt is empty"),
        (text2image.main, ["--distill_steps", "4"], "--distill_steps"),
        (text2image.main, ["--distill_steps", "9"], "--distill_steps"),
        (text2image.main, ["--use_fast_tokenizer"], "--use_fast_tokenizer"),
        (text2image.main, ["--input_path", "a.jpg"], "from the prompt alone"),
        (text2image.main, ["--num_gpus", "2"], "These numbers do: 1."),
        (text2image.main, ["--model_size", "0.6B"], "--model_types text2image --model_sizes 0.6B"),
        (text2image.main, ["--model_size", "3B"], "--model_size"),
        (text2image.main, ["--dit_path", "absent.pt"], "absent.pt"),
        (text2world.main, ["--input_path", "a.jpg"], "begins with a prompt"),
        (text2world.main, ["--model_size", "2B"], "download_checkpoints"),
        (text2world.main, ["--dit_path_text2image", "absent.pt"], "absent.pt"),
        (video2world.main, ["--dit_path", "TINY_IMAGE"], "Text2Image"),
        (text2image.main, ["--dit_path", "TINY_VIDEO"], "Video2World"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    main: Callable[[list[str]], int], arguments: list[str], text: str, adapted: str, tmp_path: Path, capsys: Any
) -> None:
    places = {"ADAPTED": adapted, "PICTURE": str(ROOT / "assets/toy_world/first_frame.png")}
    places |= {"TINY_IMAGE": TINY_TEXT2IMAGE, "TINY_VIDEO": TINY_VIDEO2WORLD}
    words = [places.get(word, word) for word in arguments]
    ending = {video2world_bestofn.main: "", text2image.main: ".jpg"}.get(main, ".mp4")
    output = [] if "--save_path" in arguments else ["--save_path", f"{tmp_path}/out{ending}"]
    code = exit_code(main, *TINY, *words, *output)
    error = capsys.readouterr().err
    assert code == 2 and text in error and "Traceback" not in error, error
    assert not list(tmp_path.rglob("*.mp4"))


def test_what_the_guides_write_is_read() -> None:
    """Flags and defaults of the published programs."""
    args = read(video2world_lora, "--use_lora", "--lora_rank", "16", "--lora_alpha", "16", "--init_lora_weights")
    assert (args.use_lora, args.lora_rank, args.lora_alpha) == (True, 16, 16.0)
    assert read(video2world_lvg).num_chunks == 6
    args = read(video2world_bestofn, "--num_critic_trials", "5", "--gr00t_variant", "gr1")
    assert (args.num_generations, args.save_path, args.skip_generation) == (2, "output/best-of-n", False)
    args = read(video2video_sdedit, "--input_video_path", "a.mp4", "--dit_path_video2world", "b.pt")
    assert (args.input_path, args.dit_path, args.video2world_edit_strength) == ("a.mp4", "b.pt", 0.8)


TINY_PICTURE = ["--model_size", "tiny", "--prompt", PROMPT]


def test_a_picture_of_the_toy_world_and_a_batch_makes_the_same(tmp_path: Path) -> None:
    few = [*TINY_PICTURE, "--num_steps", "8"]
    for ending in (".jpg", ".png"):
        assert text2image.main([*few, "--seed", "1", "--save_path", str(tmp_path / f"one{ending}")]) == 0
    assert media.read_image(tmp_path / "one.jpg").shape == (3, 48, 48)
    entries = [{"prompt": PROMPT, "seed": seed, "output_image": str(tmp_path / f"{seed}.png")} for seed in range(4)]
    (tmp_path / "batch.json").write_text(json.dumps([*entries, {"prompt": PROMPT}]))
    batch = ["--batch_input_json", str(tmp_path / "batch.json"), "--save_path", str(tmp_path / "x.png")]
    assert text2image.main([*few, *batch]) == 0
    assert frames_of(tmp_path / "1.png") == frames_of(tmp_path / "one.png")
    assert (tmp_path / "output_4.png").exists()
    pictures = torch.stack([media.read_image(tmp_path / f"{seed}.png") for seed in range(4)]).permute(0, 2, 3, 1)
    seen = detect(numpy.ascontiguousarray(pictures[:, None].numpy()), ("puck",)).position["puck"]
    assert int((~numpy.isnan(seen[..., 0])).sum()) >= 3


def test_a_video_begins_with_the_picture_of_its_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    flags = [*TINY_PICTURE, "--seed", "3", "--num_steps", "4"]
    made = frames_of(out, text2world.main, *flags)
    assert text2image.main([*flags, "--save_path", str(tmp_path / "same.jpg")]) == 0
    assert (tmp_path / "out_temp.jpg").read_bytes() == (tmp_path / "same.jpg").read_bytes()
    of_picture = ["--input_path", str(tmp_path / "same.jpg")]
    assert frames_of(tmp_path / "video.mp4", video2world.main, *flags, *of_picture) == made
    entries = [{"prompt": PROMPT, "output_video": str(tmp_path / f"{i}.mp4"), "seed": 3 + i} for i in range(2)]
    (tmp_path / "batch.json").write_text(json.dumps(entries))
    assert text2world.main([*flags, "--batch_input_json", str(tmp_path / "batch.json")]) == 0
    assert frames_of(tmp_path / "0.mp4") == made


def test_configs_of_all_sizes_are_of_one_frame_without_a_mask_of_frames() -> None:
    for size in (*SIZES, "tiny"):
        config = get_cosmos_predict2_text2image_pipeline(model_size=size)
        assert type(network_of(config.net)) is DiT and config.state_t == 1


def test_a_picture_from_python() -> None:
    config = get_cosmos_predict2_text2image_pipeline(model_size="tiny")
    pipe = Video2WorldPipeline.from_config(config, TINY_TEXT2IMAGE)
    picture = pipe("", PROMPT, aspect_ratio="1:1", num_conditional_frames=0, guidance=0.0, num_sampling_step=2)
    assert picture.shape == (1, 3, 1, 48, 48)
