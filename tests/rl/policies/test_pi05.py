# SPDX-License-Identifier: Apache-2.0
"""PI0.5 as a policy, on a tiny random one in the public layout."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributions import Normal

from cosmos_predict2.rl.learner import rows_of
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.pi05.flow import noise_level
from cosmos_predict2.rl.policies.pi05.inputs import augmented, prompt_tokens, resize_with_pad
from cosmos_predict2.rl.policies.pi05.layout import BEFORE, BEHIND, WEIGHTS
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.pi05.tiny import write_tiny
from imaginaire.config import L
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.rl.policies.seen import generators, observation
from tests.rl.vla_runs import batch, model

METHODS = ("flow_sde", "flow_cps", "flow_noise")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), action_chunk=8)


def test_sentences_of_ones_own_are_not_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = [f"Bring the {colour} cup, which stands on shelf 7, to JUNCTION 42" for colour in ("red", "blue")]
    policy = Pi05Policy(str(write_tiny(tmp_path, sentences=[*own, "push the puck to the ring"])))
    tokens, mask = (torch.stack(part) for part in zip(*(policy._prompt({"task_description": own}, i) for i in (0, 1))))
    assert 16 < mask.sum(dim=1).max() == policy.config.max_token_len and not torch.equal(tokens[0], tokens[1])
    assert (tokens != 3).all() and "is cut" not in caplog.text  # no unknown piece
    with pytest.raises(DataError, match=r"different characters.*--base"):
        write_tiny(tmp_path / "others", sentences=["".join(map(chr, range(0x4E00, 0x4E00 + 200)))])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("joint", [False, True])
def test_probabilities_are_those_that_were_drawn_with(folder: Path, method: str, joint: bool) -> None:
    policy = Pi05Policy(str(folder), noise_method=method, joint_logprob=joint, noise_anneal=True, num_steps=3)
    policy.on_trainer_step(100)
    decision = policy.act(observation(), mode="sample", generators=generators())
    policy.on_trainer_step(200)  # which changes what is drawn from now on, not what was
    found = policy.log_prob(decision.record)
    assert found.log_prob_B_K_N.shape == (3, 8, 4) and decision.actions_E_A_D.shape == (3, 8, 4)
    torch.testing.assert_close(found.log_prob_B_K_N, decision.log_prob_E_K_N, rtol=0, atol=1e-5)
    found.log_prob_B_K_N.sum().backward()
    assert policy.network.action_out_proj.weight.grad.abs().sum() > 0
    assert (found.entropy_B_K_N is not None) == (method == "flow_noise")


def test_an_action_that_is_held_is_the_mean_of_what_was_demonstrated(folder: Path) -> None:
    policy, seen = Pi05Policy(str(folder), hold=2), observation()
    draws = torch.Generator().manual_seed(0)
    actions = torch.rand(3, 2 * policy.config.action_horizon, policy.action_dim, generator=draws)
    means = actions.unflatten(1, (-1, 2)).mean(dim=2)
    found = policy.record_of(seen, actions)["actions"][..., : policy.action_dim]
    torch.testing.assert_close(policy.action_stats.restored(found), means, rtol=1e-4, atol=1e-4)
    for step in (7, 3):
        policy.on_trainer_step(step)
        assert policy.trainer_step == step


def test_annealed_noise_stays_at_its_last_level() -> None:
    found = [noise_level(0.5, True, (0.7, 0.3, 400), step) for step in (0, 200, 400, 800)]
    assert found == pytest.approx([0.7, 0.5, 0.3, 0.3])


@pytest.mark.parametrize("method", METHODS)
def test_one_step_is_drawn_and_the_others_solve_the_equation(folder: Path, method: str) -> None:
    policy = Pi05Policy(str(folder), noise_method=method, num_steps=4)
    record = policy.act(observation(), mode="sample", generators=generators()).record
    cache, chains = policy._prefix(record), record["chains"]
    for k in range(4):
        v, _ = policy.network.velocity(cache, chains[:, k], torch.full((3,), 1 - k / 4))
        off = (chains[:, k + 1] - chains[:, k] + v / 4).abs().amax(dim=(1, 2))
        assert torch.equal(off > 1e-3, record["denoise_inds"][:, 0] == k)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (dict(noise_method="flow_sde"), {0, 1}),
        (dict(noise_method="flow_sde", ignore_last=True), {0}),
        (dict(noise_method="flow_cps"), {0}),
        (dict(noise_method="flow_cps", ignore_last=False), {0, 1}),
    ],
)
def test_the_last_step_is_drawn_unless_it_is_ignored(folder: Path, options: dict, steps: set[int]) -> None:
    policy = Pi05Policy(str(folder), num_steps=2, **options)
    found = policy.act(observation(24, views=0), mode="sample", generators=generators(24)).record["denoise_inds"]
    assert set(found.flatten().tolist()) == steps


def test_fewer_actions_are_executed_and_counted(folder: Path) -> None:
    policy = Pi05Policy(str(folder), execute_steps=5)
    decision = policy.act(observation(), mode="sample", generators=generators())
    whole = Pi05Policy(str(folder)).log_prob(decision.record).log_prob_B_K_N
    assert decision.actions_E_A_D.shape[1] == policy.chunk == 5
    torch.testing.assert_close(policy.log_prob(decision.record).log_prob_B_K_N, whole[:, :5])


def test_what_it_sees_and_does_has_the_published_order_and_units(tmp_path: Path) -> None:
    stats = {"state": {"q01": [-2.0] * 3, "q99": [2.0] * 3}, "actions": {"q01": [-1.0] * 4, "q99": [3.0] * 4}}
    sizes = dict(norm_stats=stats, action_horizon=4, hold=3, discrete_state_input=True, max_token_len=64)
    policy, seen = Pi05Policy(str(write_tiny(tmp_path, **sizes))), observation()
    seen["full_image"], seen["wrist_image"] = seen["full_image"][:, :, :48], seen["wrist_image"][:, :, :, :48]
    record = policy.seen(seen)
    views = torch.stack([seen["full_image"], seen["wrist_image"][:, 0]], dim=1)  # the scene, then the hand
    framed = resize_with_pad(views.flatten(0, 1), 56, 56).unflatten(0, (3, 2))
    assert torch.equal(record["images"], framed) and record["image_masks"].all()
    alone = Pi05Policy(str(tmp_path), num_images=1).seen(seen)["images"]
    assert torch.equal(alone, framed[:, :1])  # as many views as it was trained with
    for i in range(3):
        given = (policy._encode, seen["task_description"][i], seen["state"][i] / 2, 64)
        for name, value in zip(("tokens", "token_mask"), prompt_tokens(*given)):
            assert torch.equal(record[name][i], value)
    with mock.patch.object(policy.network, "prefix", wraps=policy.network.prefix) as prefix:
        decision = policy.act(seen, mode="greedy", generators=generators())
    assert torch.equal(prefix.call_args.args[0], framed.permute(0, 1, 4, 2, 3) / 127.5 - 1)
    restored = (decision.record["chains"][:, -1, :, :4] + 1) / 2 * 4 - 1
    torch.testing.assert_close(decision.actions_E_A_D.unflatten(1, (4, 3)), restored[:, :, None].expand(-1, -1, 3, -1))
    with pytest.raises(DataError, match="greedy decision has no probability"):
        policy.log_prob(decision.record)
    known = policy.record_of(seen, decision.actions_E_A_D)["actions"]
    torch.testing.assert_close(known[..., :4], decision.record["chains"][:, -1, :, :4], rtol=0, atol=1e-5)
    assert known.shape == (3, 4, 8) and not known[..., 4:].any()


@pytest.mark.parametrize("is_safe", [False, True])
def test_the_noise_heads_spread_is_the_entropy_and_safe_probabilities_are_squares(folder: Path, is_safe: bool) -> None:
    policy = Pi05Policy(str(folder), noise_method="flow_noise", num_steps=1, safe_get_logprob=is_safe)
    decision = policy.act(observation(), mode="sample", generators=generators())
    record = decision.record
    start, end = (record["chains"][:, k] for k in range(2))
    v, hidden = policy.network.velocity(policy._prefix(record), start, torch.ones(3))
    drawn = torch.distributions.Normal(start - v, policy.network.noise_head(hidden))
    found = policy.log_prob(record)
    expected = -(end - drawn.mean).square() if is_safe else drawn.log_prob(end)
    for value in (found.log_prob_B_K_N, decision.log_prob_E_K_N):
        torch.testing.assert_close(value, expected[:, :8, :4], rtol=0, atol=1e-4)
    torch.testing.assert_close(found.entropy_B_K_N, drawn.entropy()[:, :8, :4], rtol=0, atol=1e-4)


def test_what_is_drawn_spreads_with_the_temperature(folder: Path) -> None:
    policy = Pi05Policy(str(folder), num_steps=1)
    none, one, two = (
        policy.act(observation(), mode="sample", generators=generators(), temperature=float(t)).record["chains"][:, 1]
        for t in range(3)
    )
    torch.testing.assert_close(two - none, 2 * (one - none))
    assert not torch.equal(one, none)


def test_noise_of_neighbouring_actions_goes_together(folder: Path) -> None:
    def noise(correlation: float) -> torch.Tensor:
        policy = Pi05Policy(str(folder), num_steps=1, correlation=correlation)
        of_heat = [
            policy.act(observation(), mode="sample", generators=generators(), temperature=t).record["chains"][:, 1]
            for t in (0.0, 1.0)
        ]
        return of_heat[1] - of_heat[0]

    single, together = noise(0.0), noise(0.9)
    torch.testing.assert_close(together[:, 0], single[:, 0])
    torch.testing.assert_close(together[:, 1], 0.9 * single[:, 0] + 0.19**0.5 * single[:, 1])
    torch.testing.assert_close(together[:, 2], 0.9 * together[:, 1] + 0.19**0.5 * single[:, 2])


def test_cloning_regresses_noise_less_action_at_published_times(folder: Path) -> None:
    policy = Pi05Policy(str(folder))
    record = policy.record_of(observation(), torch.rand(3, 12, 4) - 0.5)
    actions, times = record["actions"], torch.tensor([0.1, 0.5, 0.9])
    noise, t = torch.randn_like(actions), times[:, None, None]
    with mock.patch.object(policy.network, "velocity", return_value=(noise - actions, None)) as velocity:
        assert not policy.flow_loss(record, actions, noise, times).any()
    torch.testing.assert_close(velocity.call_args.args[1], t * noise + (1 - t) * actions)
    with mock.patch.object(policy, "flow_loss", return_value=torch.zeros(1)) as loss:
        policy.cloning_loss({"actions": torch.zeros(4000, 1, 1)}, torch.Generator().manual_seed(0))
    drawn = loss.call_args.args[3]
    assert drawn.min() >= 0.001 and float(drawn.mean()) == pytest.approx(0.001 + 0.999 * 0.6, abs=0.01)  # Beta(1.5, 1)


def test_the_expert_alone_is_trained(folder: Path) -> None:
    policy = Pi05Policy(str(folder), train_expert_only=True).train()
    record = policy.record_of(observation(), torch.zeros(3, 12, 4))
    policy.cloning_loss(record, torch.Generator()).backward()
    trained = {name for name, value in policy.named_parameters() if value.requires_grad}
    assert trained and not any("paligemma.model" in name for name in trained)
    assert {name for name, value in policy.named_parameters() if value.grad is not None} == trained
    assert not policy.network.paligemma.training and policy.network.expert.training
    whole = Pi05Policy(str(folder))
    whole.cloning_loss(record, torch.Generator()).backward()
    for part in ("vision_tower", "multi_modal_projector", "language_model"):  # what is seen learns with the rest
        assert any(value.grad is not None and value.grad.any() for value in whole.network.paligemma[part].parameters())


def test_pictures_are_augmented_where_it_is_cloned_alone(folder: Path) -> None:
    draws = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 2, 3, 40, 60, generator=draws) * 2 - 1
    found = [augmented(pixels, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=0.05)
    assert found[0].shape == pixels.shape and found[0].abs().max() <= 1
    alone = augmented(pixels[:1], torch.Generator().manual_seed(0))
    torch.testing.assert_close(alone, found[0][:1])  # one draw for a batch
    bar = torch.full((1, 2, 3, 40, 60), -1.0)
    bar[..., 20:, :] = 0.0
    base, wrist = augmented(bar, torch.Generator().manual_seed(2))[0]
    assert len(wrist.flatten(1).T.unique(dim=0)) == 2  # recoloured alone
    assert base.std(dim=2).max() > 0.05  # and this one is turned
    policies = [Pi05Policy(str(folder), augment=augment) for augment in (False, True)]
    record = policies[0].record_of(observation(), torch.zeros(3, 12, 4))
    losses = [float(policy.cloning_loss(record, torch.Generator().manual_seed(5)).detach()) for policy in policies]
    assert losses[0] != losses[1]
    acts = [policy.act(observation(), mode="greedy", generators=generators()).actions_E_A_D for policy in policies]
    assert torch.equal(*acts)


def test_what_is_saved_is_what_was_read(folder: Path, tmp_path: Path) -> None:
    policy = Pi05Policy(str(folder), num_steps=2)
    policy.save(tmp_path / "out")
    assert _same(load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS))
    again = Pi05Policy(str(tmp_path / "out"))
    assert again.config == policy.config
    again.save(tmp_path / "out")  # onto itself
    assert _same(load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS))


def test_older_names_are_translated_and_others_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "old")
    tensors = load_file(folder / WEIGHTS)
    old = {}
    for name, value in tensors.items():
        name = name.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
        name = name.replace("paligemma.model.", "paligemma.").replace("time_mlp_", "action_time_mlp_")
        old[f"model.{name}"] = value
    del old["model.paligemma_with_expert.paligemma.language_model.model.embed_tokens.weight"]
    old["model.state_proj.weight"] = torch.zeros(2)
    old["model.paligemma_with_expert.gemma_expert.model.norm.weight"] = torch.zeros(2)
    save_file(old, tmp_path / "old" / WEIGHTS)
    found = Pi05Policy(str(tmp_path / "old")).state_dict()
    assert _same(found, Pi05Policy(str(folder)).state_dict())
    save_file({**old, "model.surprise": torch.zeros(1)}, tmp_path / "old" / WEIGHTS)
    with pytest.raises(CheckpointError, match="surprise"):
        Pi05Policy(str(tmp_path / "old"))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_cannot_be_decided_is_refused(folder: Path, tmp_path: Path) -> None:
    for options, text in (
        (dict(noise_method="sde"), "flow_sde, flow_cps"),
        (dict(execute_steps=9), "smallest first"),
        (dict(noise_levle=1.0), "noise_level"),
        (dict(noise_method="flow_cps", num_steps=1), "no step that is drawn"),
        (dict(hold=0), "hold=0 must be from 1 to"),
        (dict(correlation=-0.1), "correlation=-0.1 must be at least 0, and below 1"),
        (dict(num_steps="4"), "num_steps='4' must be of type int"),
        (dict(noise_level=True), "noise_level=True must be of type float"),
        (dict(noise_params=[1, 2]), r"noise_params=\[1.0, 2.0\]"),
        (dict(noise_logvar_range=[0, 0.1]), "two deviations above 0"),
        (dict(asset_id="toyy"), r"assets/toyy: 0 files.*policy\.asset_id"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=text):
            Pi05Policy(str(folder), **options)
    blind = Pi05Policy(str(folder), discrete_state_input=True)
    with pytest.raises(ConfigError, match=r"discrete_state_input.*the environment has none"):
        blind.act({**observation(), "state": torch.zeros(3, 0)}, mode="greedy", generators=generators())
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match="paligemma-3b"):
        Pi05Policy(str(tmp_path / "other"))
    (tmp_path / "other" / "config.json").write_text(json.dumps({"pi05": False}))
    with pytest.raises(CheckpointError, match=r"PI0\.5 alone"):
        Pi05Policy(str(tmp_path / "other"))
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "openvla"}))
    with pytest.raises(CheckpointError, match=r"model of type 'openvla', not PI0\.5"):
        Pi05Policy(str(tmp_path / "other"))


def test_one_of_several_statistics_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "two")
    other = tmp_path / "two" / "assets" / "robot" / "kitchen"
    shutil.copytree(folder / "assets" / "toy", other)
    content = json.loads((other / "norm_stats.json").read_text())
    content["norm_stats"]["actions"]["q99"] = [3.0] * 4
    (other / "norm_stats.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"2 files.*policy\.asset_id"):
        Pi05Policy(str(tmp_path / "two"))
    policy = Pi05Policy(str(tmp_path / "two"), asset_id="robot/kitchen")
    assert policy.action_stats.q99.tolist() == [3.0] * 4
    policy.save(tmp_path / "out")
    assert Pi05Policy(str(tmp_path / "out")).action_stats.q99.tolist() == [3.0] * 4


def test_lerobots_names_of_settings_are_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "lerobot")
    file = tmp_path / "lerobot" / "config.json"
    content = json.loads(file.read_text())
    theirs = {
        "action_horizon": "chunk_size", "action_dim": "max_action_dim", "num_steps": "num_inference_steps",
        "max_token_len": "tokenizer_max_length",
    }  # fmt: skip
    for name in ("model_type", "pi05", "execute_steps"):
        del content[name]
    content = {theirs.get(name, name): value for name, value in content.items()}
    file.write_text(json.dumps({**content, "type": "pi05", "n_action_steps": 5, "max_state_dim": 32}))
    config = Pi05Policy(str(folder), execute_steps=5).config
    assert Pi05Policy(str(tmp_path / "lerobot")).config == config
    policy, _ = read_policy(str(tmp_path / "lerobot"), options=dict(num_steps=2))
    policy.save(tmp_path / "out")
    assert read_policy(str(tmp_path / "out"))[0].config == replace(config, num_steps=2)


def test_a_folder_as_lerobot_saves_it_is_read_as_lerobot_reads_it(folder: Path, tmp_path: Path) -> None:
    """The names, files and numbers are those that lerobot 0.4.4 wrote and computed, from these statistics."""
    path = _lerobot_folder(folder, tmp_path / "saved")
    policy, _ = read_policy(str(path))
    config = policy.config
    assert (config.num_images, config.action_env_dim, config.state_dim) == (3, 3, 32) and config.discrete_state_input
    for found, theirs in (
        (policy.state_stats.normalised(torch.tensor(STATE)), NORMALISED),
        (policy.action_stats.restored(torch.tensor([-1.2, 0.0, 0.8])), RESTORED),
    ):
        torch.testing.assert_close(found, torch.tensor(theirs), rtol=0, atol=1e-5)
    seen = {}
    policy._encode = lambda text, begins: seen.setdefault("text", text) and [1]
    policy._prompt({"task_description": ["pick_up the cup\n"], "state": torch.tensor([STATE])}, 0)
    assert seen["text"] == f"Task: pick up the cup, State: {BINS}{' 128' * 28};\nAction: "
    same = dict(Pi05Policy(str(folder)).network.named_parameters())
    assert all(torch.equal(value, same[name]) for name, value in policy.network.named_parameters())
    policy.save(tmp_path / "out")
    again, _ = read_policy(str(tmp_path / "out"))
    assert again.config == config and (tmp_path / "out" / BEHIND).is_file()
    assert torch.equal(again.action_stats.q01, policy.action_stats.q01) and again.action_stats.epsilon == 0


def test_statistics_of_ones_own_leave_lerobots_processors_behind(folder: Path, tmp_path: Path) -> None:
    """These hold the old ones, by which lerobot would scale the actions."""
    path = _lerobot_folder(folder, tmp_path / "saved")
    policy = Pi05Policy(str(path), statistics={"q01": [-4.0] * 3, "q99": [5.0] * 3})
    policy.save(tmp_path / "out")
    assert not [file.name for file in (tmp_path / "out").iterdir() if "processor" in file.name]
    again, _ = read_policy(str(tmp_path / "out"))
    assert torch.equal(again.action_stats.q01, policy.action_stats.q01) and float(again.action_stats.q01[0]) == -4
    assert again.config == policy.config and torch.equal(again.state_stats.q99, policy.state_stats.q99)


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [("MEAN_STD", -0.25, 0.75), ("MIN_MAX", -2.0, 3.0), ("QUANTILE10", -0.5, 1.0), ("IDENTITY", -1.0, 1.0)],
)
def test_every_scale_of_lerobot_is_read(mode: str, low: float, high: float, folder: Path, tmp_path: Path) -> None:
    row = dict(mean=0.25, std=0.5, min=-2.0, max=3.0, q10=-0.5, q90=1.0, q01=-1.5, q99=2.5)
    path = _lerobot_folder(folder, tmp_path / "saved", mode=mode, action={n: [v] * 3 for n, v in row.items()})
    stats = Pi05Policy(str(path), load=False).action_stats
    assert stats.q01.tolist() == [low] * 3 and stats.q99.tolist() == [high] * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda path: _step(path, "relative_actions_processor", {"enabled": True}), "relative_actions_processor"),
        (lambda path: _step(path, "my_own_processor", {}), r"step 'my_own_processor', which is not known here"),
        (lambda path: (path / UNNORMALISER).unlink(), r"statistics of action \(q01, q99\) are missing.*assets/"),
        (lambda path: (path / BEHIND).unlink(), BEHIND),
        (lambda path: (path / BEFORE).write_text("[" * 100_000), BEFORE),
        (lambda path: (path / BEFORE).write_text('{"steps": [3]}'), BEFORE),
    ],
)
def test_processors_that_cannot_be_followed_are_named(change: Any, named: str, folder: Path, tmp_path: Path) -> None:
    path = _lerobot_folder(folder, tmp_path / "saved")
    change(path)
    with pytest.raises(CheckpointError, match=named):
        Pi05Policy(str(path))


def test_a_switch_of_newer_revisions_that_is_off_is_passed_over(folder: Path, tmp_path: Path) -> None:
    path = _lerobot_folder(folder, tmp_path / "saved")
    _step(path, "relative_actions_processor", {"enabled": False, "exclude_joints": []})
    assert Pi05Policy(str(path), load=False).config.num_images == 3


# A state of four numbers by lerobot 0.4.4, from low to high: q01 + (v + 1) (q99 - q01) / 2.
LOW, HIGH = [-0.5, -1.25, 0.0, -1.0], [1.5, 0.75, 2.0, -1.0]  # of the last, one value alone
STATE, NORMALISED, BINS = [0.25, -2.0, 1.0, -1.0], [-0.25, -1.75, 0.0, -1.0], "96 -1 128 0"
RESTORED = [-0.7, -0.25, 1.8]
NORMALISER = "policy_preprocessor_step_2_normalizer_processor.safetensors"
UNNORMALISER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def _lerobot_folder(
    folder: Path, path: Path, mode: str = "QUANTILES", action: Mapping[str, list[float]] | None = None
) -> Path:
    """A tiny policy with what `PreTrainedPolicy.save_pretrained` and both processors of lerobot 0.4.4 write."""
    shutil.copytree(folder, path)
    shutil.rmtree(path / "assets")
    weights = load_file(path / "model.safetensors")
    save_file({f"model.{name}": value for name, value in weights.items()}, path / "model.safetensors")
    content = json.loads((path / "config.json").read_text())
    theirs = {"action_horizon": "chunk_size", "action_dim": "max_action_dim", "num_steps": "num_inference_steps"}
    ours = ("model_type", "pi05", "action_env_dim", "action_chunk", "discrete_state_input", "num_images", "state_dim")
    content = {theirs.get(name, name): value for name, value in content.items() if name not in ours}
    camera, cameras = {"type": "VISUAL", "shape": [3, 24, 32]}, ("front", "wrist", "empty_camera_0")
    inputs = {**{f"observation.images.{name}": camera for name in cameras}, "observation.state": _feature("STATE", 4)}
    outputs = {"action": _feature("ACTION", 3)}
    content |= {"type": "pi05", "max_state_dim": 32, "input_features": inputs, "output_features": outputs}
    content |= {"dtype": "float32", "rtc_config": None, "optimizer_fused": False, "empty_cameras": 1, "device": "cpu"}
    (path / "config.json").write_text(json.dumps(content))
    norm_map = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": mode}
    normaliser = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": norm_map}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "normalizer_processor", "config": normaliser, "state_file": NORMALISER},
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "google/paligemma-3b-pt-224"}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    unnormaliser = {**normaliser, "features": outputs}
    behind = [
        {"registry_name": "unnormalizer_processor", "config": unnormaliser, "state_file": UNNORMALISER},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    (path / BEFORE).write_text(json.dumps({"name": "policy_preprocessor", "steps": before}))
    (path / BEHIND).write_text(json.dumps({"name": "policy_postprocessor", "steps": behind}))
    action = action or {"q01": LOW[:3], "q99": HIGH[:3]}
    tensors = {f"action.{name}": torch.tensor(value) for name, value in action.items()}
    tensors |= {"observation.state.q01": torch.tensor(LOW), "observation.state.q99": torch.tensor(HIGH)}
    for file in (NORMALISER, UNNORMALISER):
        save_file({**tensors, "action.count": torch.tensor([100.0])}, path / file)
    return path


def _feature(kind: str, size: int) -> dict[str, Any]:
    return {"type": kind, "shape": [size]}


def _step(path: Path, name: str, config: dict[str, Any]) -> None:
    """Put a step before all others of the first processor."""
    content = json.loads((path / BEFORE).read_text())
    content["steps"].insert(0, {"registry_name": name, "config": config})
    (path / BEFORE).write_text(json.dumps(content))


def test_only_a_step_of_flow_sde_that_is_drawn_alone_gives_its_mean_and_deviation(folder: Path) -> None:
    others = [dict(noise_method=method) for method in METHODS[1:]]
    for options in (*others, dict(joint_logprob=True), dict(safe_get_logprob=True)):
        policy = Pi05Policy(str(folder), **options)
        assert policy.log_prob(policy.act(observation(), mode="sample", generators=generators()).record).step is None
    policy = Pi05Policy(str(folder), num_steps=5)
    record = policy.act(observation(), mode="sample", generators=generators()).record
    found, rows = policy.log_prob(record), torch.arange(len(record["chains"]))
    assert found.step is not None
    after = record["chains"][rows, record["denoise_inds"][:, 0] + 1]
    drawn = after[:, : policy.config.executed, : policy.config.env_dim]
    density = Normal(found.step.mean_B_K_N, found.step.std_B[:, None, None]).log_prob(drawn)
    torch.testing.assert_close(found.log_prob_B_K_N, density)
    torch.testing.assert_close(found.step.dt_B, torch.full((len(rows),), 0.2))


def test_it_learns_by_guard(folders: dict[str, str]) -> None:
    """On the weights that drew, the gradient of a decision is that of grpo times std / dt."""
    gradients = []
    for objective in ("grpo", "guard"):
        learner = model(L(Pi05Policy)(path=folders["pi05"]), objective=objective)
        whole = next(learner.train_batches([batch(size=1)]))
        one = replace(rows_of(whole, whole.advantage_B.nonzero().flatten()[:1]), share=1.0, is_before_update=True)
        output, loss = learner.training_step(one, 0)
        loss.backward()
        assert abs(float(output["ratio_max"]) - 1) < 1e-4
        gradients.append(learner.net.network.action_out_proj.weight.grad.clone())
    step = learner.net.log_prob(one.record).step
    assert step is not None and gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0] * float(step.std_B / step.dt_B), rtol=1e-3, atol=1e-6)


def test_it_learns_by_grpo_and_its_noise_is_annealed_by_the_trainers_step(folders: dict[str, str]) -> None:
    learner = model(L(Pi05Policy)(path=folders["pi05"], noise_anneal=True, train_expert_only=True))
    decisions = next(learner.train_batches([batch(size=2)]))
    assert decisions.facts["draw_difference"] < 1e-5
    output, loss = learner.training_step(decisions, 0)
    loss.backward()
    assert abs(float(output["ratio_max"]) - 1) < 1e-4 and learner.net.network.action_out_proj.weight.grad.any()
    level = float(decisions.record["noise_level"][0])
    learner.on_before_zero_grad(None, None, 400)
    after = learner.net.act(observation(), mode="sample", generators=generators()).record["noise_level"]
    assert (level, float(after[0])) == pytest.approx((0.7, 0.3))


def test_a_folder_without_a_policy_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json.*\n.*train_policy --policy pi05 --out .*nothing"):
        Pi05Policy(path=str(tmp_path / "nothing"))
