# SPDX-License-Identifier: Apache-2.0
"""The passes of a model that trains on its own clips, and what it keeps meanwhile, for the planning of runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """Passes of one clip through the network in an experience: what a rank makes of one batch, and trains on."""

    rollout: int
    old: int  # of the policy that sampled, where that is another than the one trained
    reference: int
    policy: int  # with a gradient
    data: int  # likewise
    graphs: int  # passes whose activations a clip of a micro-batch keeps at a time
    clips: int  # of a rank
    clips_at_once: int  # in a micro-batch
    updates: int  # optimizer steps
    weight_copies: int  # of the trained weights
    kept_latents: int  # that each clip keeps on the device until it is trained on, of this rank's frames

    @property
    def without_gradient(self) -> int:
        return self.rollout + self.old + self.reference

    @property
    def with_gradient(self) -> int:
        return self.policy + self.data
