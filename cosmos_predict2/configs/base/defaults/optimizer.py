# SPDX-License-Identifier: Apache-2.0
"""Group ``optimizer``. The model is given when the optimizer is built."""

from imaginaire.config import PLACEHOLDER, L, register_group
from imaginaire.optim.adamw import adamw, fused_adamw
from imaginaire.optim.muon import muon

OPTIMIZERS = {
    "fusedadamw": L(fused_adamw)(  # float32 masters when the parameters are bfloat16
        model=PLACEHOLDER,
        lr=1e-4,
        weight_decay=0.1,
        betas=[0.9, 0.99],
        eps=1e-8,
        optim_type="fusedadam",
        master_weights=True,
        capturable=True,
        decay_1d=True,
    ),
    "adamw": L(adamw)(model=PLACEHOLDER, lr=1e-4, weight_decay=0.1, betas=[0.9, 0.99], eps=1e-8),
    # For small networks: the matrices of the blocks by Muon, the rest by AdamW.
    "muon": L(muon)(model=PLACEHOLDER, lr=0.03, adam_lr=2e-3, precision="auto"),
}


def register() -> None:
    register_group("optimizer", OPTIMIZERS)
