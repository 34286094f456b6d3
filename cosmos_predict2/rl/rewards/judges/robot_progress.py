# SPDX-License-Identifier: Apache-2.0
"""How far a robot has come with its task, judged by a Qwen3-VL that sees some frames of a clip.

TOPReward is the log-probability of the last word of a statement, "True", by an untrained model. Robometer was trained:
heads read progress and success behind each frame. Clips' prompts are the tasks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.judges import qwen_video
from cosmos_predict2.text import pretrained, qwen_vl
from imaginaire import foreign_json
from imaginaire.checkpoint import weight_files, weights
from imaginaire.errors import CheckpointError

BASE, ROBOMETER, ROBOMETER_BASE = "Qwen/Qwen3-VL-8B-Instruct", "lerobot/Robometer-4B", "Qwen/Qwen3-VL-4B-Instruct"
PATCH, HALF = 16, (0.5, 0.5, 0.5)  # pixels; mean and deviation of colours
LEAST, MOST = 4096, 25165824  # pixels of all frames of a video together, or of a picture
TASK, PICTURE = "{task}", "<|vision_start|><|video_pad|><|vision_end|>"
SPECIAL = [f"<|{name}_token|>" for name in ("split", "reward", "pref", "sim", "prog")]  # in the order of their rows
# In our words: those of the publications belong to their authors (``prompt_path``).
STATEMENT = "The frames above show how a robot does this task: {task} True or False? The answer is: True"
QUESTION = "A robot is to do this task: {task} How much of it is done at each frame, from 0 to 1?"


class TOPReward:
    """The log-probability of the last token of a statement about the task, behind frames taken twice a second.

    ``prompt_path`` is a file with the published statement, ``{task}`` where the task goes.
    """

    needs_pixels = True

    def __init__(
        self,
        model_path: str = BASE,
        device: str = "",
        dtype: str = "",
        prompt_path: str = "",
        max_frames: int = 16,
        clips_at_once: int = 4,
    ) -> None:
        package = pretrained.transformers()
        self.max_frames, self.clips_at_once = max_frames, clips_at_once
        self.prompt = qwen_video.wording("prompt_path", prompt_path, STATEMENT, [TASK]).strip()
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, model_path)
        config = pretrained.config_of(package.Qwen3VLConfig, model_path)
        tied = ("lm_head.weight",) if config.text_config.tie_word_embeddings else ()
        make = package.Qwen3VLForConditionalGeneration
        place, source = qwen_video.place_and_dtype(device, dtype), weights.read(model_path)
        self.model = qwen_video.loaded(lambda: make(config), source, model_path, place, tied)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        log_B = qwen_video.in_batches(clips, self._question, self._judged, self.clips_at_once)[:, 0]
        return {"value": log_B, "probability": log_B.exp()}

    def _question(self, video_C_F_H_W: Tensor, fps: float, task: str) -> qwen_vl.VideoQuestion:
        pairs = max(1, min(self.max_frames, round(video_C_F_H_W.shape[1] / fps * 2)) // 2)
        frames = _evenly(video_C_F_H_W, 2 * pairs)
        pictures = "".join(f"<{k + 0.25:.1f} seconds>{PICTURE}" for k in range(pairs))
        text = f"<|im_start|>user\n{pictures}{self.prompt.replace(TASK, qwen_vl.plain(task))}"
        return _question_of(self.tokenizer, text, frames, self.model, together=len(frames))

    @torch.no_grad()
    def _judged(self, batch: Sequence[qwen_vl.VideoQuestion]) -> Tensor:
        given = qwen_vl.model_input(batch, self.model.config.video_token_id, self.model)
        logits_B_V = self.model(**given, logits_to_keep=2, use_cache=False).logits[:, -2].float()
        return logits_B_V.log_softmax(dim=1).gather(1, given["input_ids"][:, -1:]).cpu()


class Robometer:
    """``progress`` of the last of up to 8 frames, 0 to 1, and the probability of ``success`` there.

    ``model_path`` is a folder in LeRobot's layout or an id of the hub. The tokenizer is that of ``base_path``.
    """

    needs_pixels = True

    def __init__(
        self,
        model_path: str = ROBOMETER,
        device: str = "",
        dtype: str = "",
        base_path: str = ROBOMETER_BASE,
        prompt_path: str = "",
        max_frames: int = 8,
        clips_at_once: int = 4,
    ) -> None:
        package = pretrained.transformers()
        self.max_frames, self.clips_at_once = max_frames, clips_at_once
        self.prompt = qwen_video.wording("prompt_path", prompt_path, QUESTION, [TASK]).strip()
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, base_path)
        for token in SPECIAL:
            self.tokenizer.add_tokens([token], special_tokens=True)
        file = weight_files.local_file(weight_files.below(model_path, pretrained.CONFIG))
        settings = foreign_json.load_object(file)
        form = [settings.get(key) for key in ("use_multi_image", "use_per_frame_progress_token", "progress_loss_type")]
        if form != [True, True, "discrete"] or not isinstance(settings.get("vlm_config"), dict):
            raise CheckpointError(f"{model_path} is no Robometer with a progress token behind each frame and bins.")
        pretrained.refuse_absurd(settings, f"{model_path}/{pretrained.CONFIG}")
        config = package.Qwen3VLConfig.from_dict(settings["vlm_config"])
        if (size := config.text_config.vocab_size) < len(self.tokenizer):
            raise CheckpointError(
                f"{base_path} has {len(self.tokenizer)} tokens with Robometer's, {model_path} {size}."
            )
        source = weights.renamed(weights.read(model_path), _robometer_name)
        bins = int(settings.get("progress_discrete_bins", 10))
        place = qwen_video.place_and_dtype(device, dtype)
        self.model = qwen_video.loaded(lambda: _Robometer(config, bins), source, model_path, place)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        progress_B, success_B = qwen_video.in_batches(clips, self._question, self._judged, self.clips_at_once).unbind(1)
        return {"value": progress_B, "progress": progress_B, "success": success_B}

    def _question(self, video_C_F_H_W: Tensor, fps: float, task: str) -> qwen_vl.VideoQuestion:
        frames = _evenly(video_C_F_H_W, min(self.max_frames, video_C_F_H_W.shape[1]))
        pictures = "".join(f"Picture {k}: {PICTURE}{SPECIAL[-1]}" for k in range(1, len(frames) + 1))
        text = f"<|im_start|>user\n{self.prompt.replace(TASK, qwen_vl.plain(task))}{pictures}<|im_end|>\n"
        # A picture is a video of one frame, twice there.
        return _question_of(self.tokenizer, text, frames.repeat_interleave(2, dim=0), self.model.model, together=1)

    @torch.no_grad()
    def _judged(self, batch: Sequence[qwen_vl.VideoQuestion]) -> Tensor:
        """[B, 2]: progress and success at the last frame."""
        network = self.model.model
        given = qwen_vl.model_input(batch, network.config.video_token_id, network)
        hidden_B_S_D = network(**given, use_cache=False).last_hidden_state
        marks_B_S = given["input_ids"] == self.tokenizer.convert_tokens_to_ids(SPECIAL[-1])
        last_B_D = torch.stack([hidden[marks][-1] for hidden, marks in zip(hidden_B_S_D, marks_B_S)])
        bins_B_N = self.model.progress_head(last_B_D).float().softmax(dim=1)
        progress_B = bins_B_N @ torch.linspace(0, 1, bins_B_N.shape[1], device=bins_B_N.device)
        success_B = self.model.success_head(last_B_D)[:, 0].float().sigmoid()
        return torch.stack([progress_B, success_B], dim=1).cpu()


class _Robometer(nn.Module):
    def __init__(self, config: Any, bins: int) -> None:
        super().__init__()
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

        self.model: Any = Qwen3VLModel(config)
        width = config.text_config.hidden_size
        self.progress_head, self.success_head = (
            nn.Sequential(
                *(nn.Linear(width, width // 2), nn.LayerNorm(width // 2), nn.GELU(), nn.Dropout()),
                nn.Linear(width // 2, outputs),
            )
            for outputs in (bins, 1)
        )


def _robometer_name(name: str) -> str | None:
    """A weight's name here; None for the words, and for what only training reads."""
    if name.startswith(("model.lm_head.", "preference_head.", "frame_pool_attn.")):
        return None
    return name.removeprefix("model.") if name.startswith("model.model.") else name


def _evenly(video_C_F_H_W: Tensor, count: int) -> Tensor:
    """[count, C, H, W]: frames from the first to the last one; of one frame the last."""
    last = video_C_F_H_W.shape[1] - 1
    chosen = torch.linspace(0 if count > 1 else last, last, count).round().long()
    return video_C_F_H_W[:, chosen].permute(1, 0, 2, 3)


def _question_of(
    tokenizer: Any, text: str, frames_F_C_H_W: Tensor, model: Any, *, together: int
) -> qwen_vl.VideoQuestion:
    sizes = [max(1, total // together) for total in (LEAST, MOST)]
    patches = qwen_vl.patches_of(frames_F_C_H_W, sizes[0], sizes[1], PATCH, HALF, HALF)
    return qwen_vl.question_of(tokenizer, text, patches, model.config.video_token_id)
