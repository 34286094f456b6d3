# SPDX-License-Identifier: Apache-2.0
"""Every policy that ships keeps the contract; a policy that breaks one of its rules is caught by that rule, and one
whose log_prob is not that of its draws also by the first experience of a run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.interfaces import ContractError, Decision, LogProb, Observation
from cosmos_predict2.rl.policies.contract import check_policy
from cosmos_predict2.rl.policies.conv import ConvPolicy
from cosmos_predict2.rl.policies.network import cast, tolerance_of
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.toy_world.physics import find_tasks
from imaginaire.errors import TrainingError
from tests.rl.policies.seen import generators
from tests.rl.vla_runs import batch, model


def seen(num_envs: int = 8) -> Observation:  # fewer decisions for the thousand numbers of check_spread
    return ToyEnv(num_envs).reset(seed=0)[0]


SHIPPED = [
    ("toy", "float32", dict(noise=0.5)),
    ("toy", "bfloat16", dict(noise=0.5)),
    ("conv", "float32", {}),
    ("conv", "bfloat16", dict(noise=0.4, correlation=0.9, num_knots=3)),
    pytest.param("openvla", "float32", dict(variant="autoregressive", temperature=0.7), marks=pytest.mark.long),
    ("openvla", "bfloat16", dict(variant="oft", temperature=1.6, lora_rank=2)),
    ("pi05", "float32", dict(noise_method="flow_sde", joint_logprob=True)),
    ("pi05", "float32", dict(safe_get_logprob=True, discrete_state_input=True, max_token_len=64)),
    ("pi05", "float32", dict(noise_method="flow_noise", joint_logprob=True, train_expert_only=True)),
    ("pi05", "bfloat16", dict(noise_method="flow_sde")),
    ("pi05", "bfloat16", dict(noise_method="flow_cps", train_expert_only=True)),
]
UNREACHED = [  # of PI0.5's language model, of whose last layer the expert reads keys and values alone
    f"network.paligemma_with_expert.paligemma.model.language_model.{name}"
    for name in ("layers.1.self_attn.[qo]_proj.*", "layers.1.mlp.*", "layers.1.post_attention_layernorm.*", "norm.*")
]


def build(name: str, options: Mapping[str, Any], folders: Mapping[str, str]) -> Any:
    torch.manual_seed(0)
    if name == "toy":
        return ToyPolicy(width=16, **options)
    if name == "conv":
        sizes = dict(actions={"q01": [-1.0] * 4, "q99": [1.0] * 4}, tasks=[find_tasks(["push_puck"])[0].sentence])
        return ConvPolicy(**sizes, **options)
    return (OpenVLAPolicy if name == "openvla" else Pi05Policy)(path=folders[name], **options)


@pytest.mark.parametrize(("name", "dtype", "options"), SHIPPED, ids=lambda value: str(value))
def test_policies_that_ship_keep_the_contract(
    name: str, dtype: str, options: dict[str, Any], folders: dict[str, str]
) -> None:
    policy = build(name, options, folders)
    cast(policy, getattr(torch, dtype))
    policy.train()
    tolerance = 1e-5 if dtype == "float32" else None  # on a CPU
    check_policy(policy, seen(), tolerance=tolerance, unreached=UNREACHED)
    assert policy.training and all(weight.grad is None for weight in policy.parameters())
    assert tolerance_of(policy) == (5e-3 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(
    ("name", "options"), [("openvla", dict(num_images_in_input=2)), ("pi05", {}), ("conv", dict(num_views=2))]
)
def test_cameras_may_have_pictures_of_their_own_sizes(
    name: str, options: dict[str, Any], folders: dict[str, str]
) -> None:
    wrist = torch.full((3, 1, 24, 36, 3), 200, dtype=torch.uint8)
    shown = {**seen(3), "wrist_image": wrist}
    decision = build(name, options, folders).act(shown, mode="greedy", generators=generators())
    pictures = {"openvla": "pixels", "pi05": "images", "conv": "pictures"}[name]
    assert decision.record[pictures].shape[:2] == (3, 2)


class Planted(ToyPolicy):
    """With a fault, by its name."""

    fault = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(width=16, noise=0.5)
        self.dropout = nn.Dropout(0.5 if self.fault == "dropout" else 0.0)
        self.unused = nn.Parameter(torch.zeros(2), requires_grad=self.fault == "unused")
        self.last: Any = None
        if self.fault == "frozen":
            self.requires_grad_(False)

    def act(self, observation: Observation, **options: Any) -> Decision:
        if self.fault == "narrow":  # and it reports what log_prob computes
            options["temperature"] = 0.5
        decision = super().act(observation, **options)
        record, actions, log_prob = dict(decision.record), decision.actions_E_A_D, decision.log_prob_E_K_N
        if self.fault == "global draws":
            actions = actions + 0.1 * torch.rand(())
        if self.fault == "narrow":
            log_prob = self.log_prob(record).log_prob_B_K_N.detach() if log_prob is not None else None
        if self.fault == "state of its own":
            self.last = record.pop("features")
        if self.fault == "company":
            actions = actions - actions.mean(dim=0, keepdim=True)
        if self.fault == "no log_prob":
            log_prob = None
        if self.fault == "not finite":
            actions = actions / 0
        if self.fault == "gradient":
            record["features"] = record["features"].requires_grad_()
        if self.fault == "rows":
            record["knots"] = record["knots"][:1]
        if self.fault == "nothing drawn":
            options["mode"] = "greedy"
            actions = super().act(observation, **options).actions_E_A_D
        return Decision(actions, record, log_prob)

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        if self.fault == "state of its own":
            record = {**record, "features": self.last[: len(record["knots"])]}
        found = super().log_prob({**record, "features": self.dropout(record["features"])})
        log_prob = found.log_prob_B_K_N
        if self.fault == "sign":
            return replace(found, log_prob_B_K_N=-log_prob)
        if self.fault == "order":
            return replace(found, log_prob_B_K_N=log_prob.flip(1))
        if self.fault == "noise":
            wide = torch.distributions.Normal(self.means(record["features"]), 0.6)
            return replace(found, log_prob_B_K_N=wide.log_prob(record["knots"]))
        if self.fault == "shape":
            return replace(found, log_prob_B_K_N=log_prob.flatten(1)[:, None])
        if self.fault == "not a number":
            return replace(found, log_prob_B_K_N=log_prob * math.nan)
        if self.fault == "batch":
            return replace(found, log_prob_B_K_N=log_prob - log_prob.mean(dim=0) + log_prob.mean())
        return found


def planted(fault: str) -> Planted:
    torch.manual_seed(0)
    return type("Faulty", (Planted,), {"fault": fault})()


# fault, the rule that names it, and whether a run sees it before it learns
FAULTS = [
    ("sign", "check_log_prob", True),
    ("order", "check_log_prob", True),
    ("noise", "check_log_prob", True),
    ("shape", "check_log_prob", True),
    ("not a number", "check_log_prob", True),
    ("batch", "check_log_prob", True),
    ("state of its own", "check_rows_of_records", False),  # an untrained network hardly looks
    ("no log_prob", "check_decision", True),
    ("narrow", "check_spread", False),  # what is reported agrees with log_prob, and is not what was drawn
    ("nothing drawn", "check_seeds", False),
    ("global draws", "check_seeds", False),
    ("company", "check_company", False),
    ("not finite", "check_decision", False),
    ("gradient", "check_decision", False),
    ("rows", "check_decision", False),
    ("dropout", "check_training_mode", False),  # the first ratio of a run is not 1
    ("unused", "check_gradients", False),
    ("frozen", "check_gradients", False),
]


def test_the_policy_of_the_faults_has_none_without_them() -> None:
    check_policy(planted(""), seen())


@pytest.mark.parametrize(("fault", "rule", "_"), FAULTS, ids=lambda value: str(value))
def test_a_fault_is_named_by_its_rule(fault: str, rule: str, _: bool) -> None:
    with pytest.raises(ContractError, match=f"^{rule}: "):
        check_policy(planted(fault), seen())


def experience(policy: Any) -> Any:
    learner = model(minibatches=2)
    learner.net = learner.source.policy = policy
    return next(learner.train_batches([batch(size=2)]))


@pytest.mark.parametrize("fault", [fault for fault, _, is_seen in FAULTS if is_seen])
def test_a_run_refuses_what_log_prob_does_not_compute_before_it_learns(fault: str) -> None:
    named = "gives no log-probability" if fault == "no log_prob" else "rl.draw_tolerance=0.005"
    with pytest.raises(TrainingError, match=named):
        experience(planted(fault))


def test_the_first_experience_of_a_sound_policy_reports_how_far_it_is_off() -> None:
    decisions = experience(planted(""))
    assert 0 <= decisions.facts["draw_difference"] < 1e-5
    assert "log_prob" not in decisions.record


def test_the_tolerance_is_that_of_the_lowest_precision_and_may_be_given() -> None:
    policy = planted("noise")
    check_policy(policy, seen(), tolerance=1.0)
    assert tolerance_of(object()) == 5e-3
