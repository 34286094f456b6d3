# SPDX-License-Identifier: Apache-2.0
"""Policies that see with transformers, as experiments name them; one's classes are imported where it is chosen."""

from typing import Any

from imaginaire.config import L


def seeing_policy(label: str, path: str = "") -> Any:
    """A policy that sees with transformers, from a folder of scripts.train_policy."""
    path = path or f"checkpoints/policies/tiny_{label}"
    if label == "pi05":
        from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy

        return L(Pi05Policy)(path=path, noise_method="flow_sde")
    from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy

    return L(OpenVLAPolicy)(path=path)
