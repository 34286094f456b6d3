# SPDX-License-Identifier: Apache-2.0
"""The physical plausibility of a video, judged by Cosmos-Reason1-7B-Reward (a Qwen2.5-VL that answers Yes or No)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.judges import qwen_video
from cosmos_predict2.text import pretrained, qwen_vl
from cosmos_predict2.text.qwen_vl import FRAMES, SIDE
from imaginaire.checkpoint import weights
from imaginaire.distributed import parallel

MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
MAX_FRAMES, MAX_TOKENS = 160, 9216
# In our words: the wording that the model was trained with belongs to its publisher (``system_prompt_path``).
SYSTEM = """You watch videos and find what cannot happen in the real world. Look at gravity, collisions, how objects \
act on each other, liquids, objects that appear, vanish or change shape, sense and use of things, causes without \
effects and effects without causes, and the motion of people. Style, sound, light, blur and camera effects are no \
faults. The first word of the answer is "Yes" or "No"."""
QUESTION = "Are there anomalies or artifacts in the video?"


class Reason1Reward:
    """``no_score``, the probability of "No" (there are no anomalies), with the two logits and their verdict.

    ``model_path`` is a folder in the public layout or an id of the hub. The published service asks the caption in place
    of the question: ``asks_caption`` does so, too. ``system_prompt_path``: a file with the model card's wording.
    """

    needs_pixels = True

    def __init__(
        self,
        model_path: str = MODEL,
        device: str = "",
        dtype: str = "",
        system_prompt_path: str = "",
        question: str = QUESTION,
        asks_caption: bool = False,
        clips_at_once: int = 4,
    ) -> None:
        package = pretrained.transformers()
        self.device, chosen = qwen_video.place_and_dtype(device, dtype)
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, model_path)
        config = pretrained.config_of(package.AutoConfig, model_path)
        kind = package.Qwen2_5_VLForConditionalGeneration
        model = pretrained.from_folder(kind, model_path, config=config, dtype=chosen)
        weights.refuse_not_finite(parallel.not_finite(dict(model.named_parameters())), model_path)
        self.model = model.to(self.device).eval()
        self.system = SYSTEM
        if system_prompt_path:
            self.system = qwen_video.wording("system_prompt_path", system_prompt_path, SYSTEM).strip()
        self.question = question
        self.asks_caption = asks_caption
        self.clips_at_once = clips_at_once
        self.yes, self.no = (self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Any]:
        logits_B_2 = qwen_video.in_batches(clips, self._question, self._logits, self.clips_at_once)
        no_score_B = logits_B_2.softmax(dim=1)[:, 1]
        return {
            "value": no_score_B,
            "no_score": no_score_B,
            "yes_logit": logits_B_2[:, 0],
            "no_logit": logits_B_2[:, 1],
            "prediction": ["Bad" if yes > no else "Good" for yes, no in logits_B_2.tolist()],
        }

    def _question(self, video_C_F_H_W: Tensor, fps: float, prompt: str) -> qwen_vl.VideoQuestion:
        patches, seconds = patches_and_pace(video_C_F_H_W, fps)
        text = qwen_vl.conversation(self.system, qwen_vl.plain(prompt if self.asks_caption else self.question))
        return qwen_vl.question_of(self.tokenizer, text, patches, self.model.config.video_token_id, seconds)

    @torch.no_grad()
    def _logits(self, batch: Sequence[qwen_vl.VideoQuestion]) -> Tensor:
        """[B, 2]: the logits of Yes and No as the first word of the answer."""
        given = qwen_vl.model_input(batch, self.model.config.video_token_id, self.model)
        pace_B = torch.tensor([one.seconds for one in batch], device=self.device)
        found = self.model(**given, second_per_grid_ts=pace_B, logits_to_keep=1, use_cache=False)
        return found.logits[:, -1, [self.yes, self.no]].float().cpu()  # type: ignore[no-any-return]


def patches_and_pace(video_C_F_H_W: Tensor, fps: float) -> tuple[qwen_vl.Patches, float]:
    """The patches of every k-th frame, as many as the model may see, and the seconds between their grid times."""
    interval = max(1, -(-video_C_F_H_W.shape[1] // MAX_FRAMES))
    frames_F_C_H_W = video_C_F_H_W[:, ::interval].permute(1, 0, 2, 3)
    num_grid_times = max(1, len(frames_F_C_H_W) // FRAMES)
    patches = qwen_vl.patches_of(frames_F_C_H_W, 16 * SIDE**2 * FRAMES, MAX_TOKENS * SIDE**2 // num_grid_times)
    return patches, FRAMES * interval / fps
