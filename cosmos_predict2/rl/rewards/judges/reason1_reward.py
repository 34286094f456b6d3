# SPDX-License-Identifier: Apache-2.0
"""The physical plausibility of a video, judged by Cosmos-Reason1-7B-Reward (a Qwen2.5-VL that answers Yes or No)."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.judges.qwen_video import conversation, patches_of
from imaginaire.errors import CheckpointError, missing_package

log = logging.getLogger(__name__)

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
    ) -> None:
        try:
            from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
        except ImportError as error:
            raise missing_package("transformers", "weights") from error
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        chosen = getattr(torch, dtype or ("bfloat16" if self.device.type == "cuda" else "float32"))
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
            model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_path, dtype=chosen)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"The judge {model_path} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.model = model.to(self.device).eval()
        self.system = Path(system_prompt_path).read_text(encoding="utf-8").strip() if system_prompt_path else SYSTEM
        self.question = question
        self.asks_caption = asks_caption
        self.yes, self.no = (self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Any]:
        assert clips.video_B_C_F_H_W is not None
        rows = [
            self._logits(video, clips.fps, prompt if self.asks_caption else self.question)
            for video, prompt in zip(clips.video_B_C_F_H_W, clips.prompts, strict=True)
        ]
        logits_B_2 = torch.stack(rows)
        no_score_B = logits_B_2.softmax(dim=1)[:, 1]
        return {
            "value": no_score_B,
            "no_score": no_score_B,
            "yes_logit": logits_B_2[:, 0],
            "no_logit": logits_B_2[:, 1],
            "prediction": ["Bad" if yes > no else "Good" for yes, no in logits_B_2.tolist()],
        }

    @torch.no_grad()
    def _logits(self, video_C_F_H_W: Tensor, fps: float, question: str) -> Tensor:
        """The logits of Yes and No as the first word of the answer."""
        patches = patches_of(video_C_F_H_W, fps, max_frames=MAX_FRAMES, max_tokens=MAX_TOKENS)
        video_token = self.model.config.video_token_id
        ids: list[int] = []
        # the place of the video is the first one: a caption that holds the same token stays text
        words = self.tokenizer.encode(
            conversation(self.system, question.replace("<|", "< |")), add_special_tokens=False
        )
        for word in words:
            ids += [word] * (patches.num_tokens if word == video_token else 1)
        ids_B_S = torch.tensor([ids], device=self.device)
        found = self.model(
            input_ids=ids_B_S,
            attention_mask=torch.ones_like(ids_B_S),
            mm_token_type_ids=(ids_B_S == video_token).int() * 2,
            pixel_values_videos=patches.values.to(self.device, self.model.dtype),
            video_grid_thw=torch.tensor([patches.grid], device=self.device),
            second_per_grid_ts=torch.tensor([patches.seconds], device=self.device),
            logits_to_keep=1,
            use_cache=False,
        )
        return found.logits[0, -1, [self.yes, self.no]].float().cpu()  # type: ignore[no-any-return]
