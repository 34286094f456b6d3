# SPDX-License-Identifier: Apache-2.0
"""OpenVLA and OpenVLA-OFT as policies: a picture and a sentence in, a chunk of actions out, each number a token.

Letters: E environments, V views, K actions of the network (each is held for ``hold`` steps), N numbers of an action.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cosmos_predict2.actions.statistics import usual_statistics
from cosmos_predict2.rl.interfaces import Decision, Generators, LogProb, Mode, Observation, PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneStart
from cosmos_predict2.rl.policies.files import check_public, require_public, result_of
from cosmos_predict2.rl.policies.network import add_adapters, correlated, merged_state
from cosmos_predict2.rl.policies.openvla import inputs
from cosmos_predict2.rl.policies.openvla.inputs import Statistics, with_gripper, without_gripper
from cosmos_predict2.rl.policies.openvla.layout import CONFIG, STATISTICS, Folder, from_public, to_public, write_folder
from cosmos_predict2.rl.policies.openvla.model import MODEL_TYPE, OpenVLAModel, OpenVLASizes
from cosmos_predict2.rl.policies.openvla.tiny import write_tiny
from cosmos_predict2.text import pretrained
from imaginaire import storage
from imaginaire.checkpoint.weight_files import below, json_in
from imaginaire.errors import CheckpointError, ConfigError, near
from imaginaire.findings import CheckContext, Finding

log = logging.getLogger(__name__)

MOST = 10_000  # of actions, numbers or pictures: more is a damaged config.json
TINY_BINS = 32  # of a tiny one that is cloned: with the 256 of the published ones it takes many times as long to learn
VARIANTS = ("oft", "autoregressive", "l1")
COUNTS = ("action_chunk", "action_dim", "hold", "num_images_in_input")
USUAL = dict(
    action_chunk=8, action_dim=7, hold=1, num_images_in_input=1, use_proprio=False, center_crop=True,
    correlation=0.0, temperature=1.0,
)  # fmt: skip
OWN = "recordings"  # the name of statistics that are not the folder's
RECORDED = (*USUAL, "gripper")
KEYS = {"temperature": "sampling_temperature"}  # in config.json, where the name itself is one of transformers
NO_PROBABILITY = (
    "policy.variant=l1 gives actions without a probability: evaluate it greedily (--mode greedy) and clone it"
    " (scripts.train_policy); reinforcement learning needs policy.variant=oft, whose actions are tokens."
)


class OpenVLAPolicy(nn.Module, PolicyDefaults):
    """A policy of a public folder or hub id, ``path``.

    "oft" decides on ``action_chunk`` actions in one pass, with every token seeing every other; "autoregressive" is the
    original, token after token; "l1" has a head for the numbers themselves, and draws nothing. The probability of a
    token is that of ``temperature``, in rollouts and in training. ``path`` gives sizes, statistics, tokenizer and
    weights. Null settings are those of its config.json; ``gripper`` is then "libero" where the statistics are of
    LIBERO. ``correlation`` is that of the draws of neighbouring actions (`network.correlated`). ``statistics`` of
    actions take the place of the folder's, also where it is saved. With ``lora_rank`` adapters are trained in place of
    the weights, after those of ``lora_path`` were added for good.
    """

    cloning: ClassVar[dict[str, Any]] = dict(demonstrations=2000, windows="all", steps=3000, lr=1.5e-3, batch_size=32)

    def __init__(
        self,
        path: str,
        variant: str = "oft",
        action_chunk: int | None = None,
        action_dim: int | None = None,
        hold: int | None = None,
        num_images_in_input: int | None = None,
        use_proprio: bool | None = None,
        unnorm_key: str = "",
        bounds: str = "q99",
        gripper: str | None = None,
        center_crop: bool | None = None,
        correlation: float | None = None,
        temperature: float | None = None,
        max_tokens: int = 64,
        attention: str = "eager",
        lora_rank: int = 0,
        lora_path: str = "",
        statistics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        path = str(path)
        if variant not in VARIANTS:
            raise ConfigError(f"policy.variant='{variant}'.{near(variant, VARIANTS)}")
        require_public(path, "openvla_oft")
        path = result_of(path)
        self.folder = Folder(path)
        config = json_in(path, CONFIG)
        if not (kind := str(config.get("model_type", MODEL_TYPE))).startswith(MODEL_TYPE):
            raise CheckpointError(f"{path} holds a model of type '{kind}', not OpenVLA: give an OpenVLA folder.")
        pretrained.refuse_absurd(config, f"{path}/{CONFIG}")
        sizes = OpenVLASizes.of(config, path)
        self.arguments: dict[str, Any] = dict(
            path=path, variant=variant, action_chunk=action_chunk, action_dim=action_dim, hold=hold,
            num_images_in_input=num_images_in_input, use_proprio=use_proprio,
            unnorm_key="" if statistics else unnorm_key, bounds=bounds,
            gripper=gripper, center_crop=center_crop, correlation=correlation, temperature=temperature,
            max_tokens=max_tokens, attention=attention,
        )  # fmt: skip
        settings = _settings(config, self.arguments)
        self.variant, self.temperature = variant, settings["temperature"]
        self.num_actions = 1 if variant == "autoregressive" else settings["action_chunk"]
        self.action_dim, self.hold = settings["action_dim"], settings["hold"]
        self.num_views, self.correlation = settings["num_images_in_input"], settings["correlation"]
        self._read_statistics(config, unnorm_key, statistics, uses_proprio=settings["use_proprio"])
        self.tokens = inputs.ActionTokens(sizes.vocabulary, sizes.bins)
        self.prompts = inputs.Prompts(self.folder.tokenizer_folder(), max_tokens, sizes.pad_id)
        self.preprocessor = inputs.Preprocessor.of(
            json_in(path, inputs.PREPROCESSOR), below(path, inputs.PREPROCESSOR), bool(settings["center_crop"])
        )
        self._read_network(sizes, attention)
        add_adapters(self.model, lora_rank, lora_path, without=("action_head.",))
        if self.model.action_head is not None:
            self.model.action_head.requires_grad_(True)

    def _read_statistics(
        self, config: Mapping[str, Any], key: str, own: Mapping[str, Any] | None, *, uses_proprio: bool
    ) -> None:
        """The folder's statistics, or with ``own`` those of actions in their place; and what the last number is."""
        path, bounds, gripper = self.folder.address, self.arguments["bounds"], self.arguments["gripper"]
        self._own_statistics: Mapping[str, Any] = {}
        if own is None:
            self.unnorm_key, entry = self.folder.statistics(config, key)
        else:
            entry = {**_known_statistics(self.folder, config, key)[1], "action": own}
            self.unnorm_key, self._own_statistics = OWN, {OWN: entry}
        self.gripper = inputs.default_gripper(config, self.unnorm_key) if gripper is None else str(gripper)
        if self.gripper not in inputs.GRIPPERS:
            raise ConfigError(f"policy.gripper='{self.gripper}'.{near(self.gripper, inputs.GRIPPERS)}")
        if "action" not in entry:
            raise CheckpointError(f"{path} has no statistics of actions in '{self.unnorm_key}': {', '.join(entry)}.")
        self.statistics = Statistics.of(entry["action"], bounds, self.action_dim)
        self.proprio_statistics = None
        if uses_proprio:
            if (proprio := entry.get("proprio")) is None:
                raise CheckpointError(f"{path}: policy.use_proprio needs statistics of proprio, which it has not.")
            self.proprio_statistics = Statistics.of(proprio, bounds)
            self.state_size = len(self.proprio_statistics.low)
        self.reads_state = self.proprio_statistics is not None

    def _read_network(self, sizes: OpenVLASizes, attention: str) -> None:
        """Build the network with the folder's weights."""
        path, (tensors, beside) = self.folder.address, self.folder.tensors()
        proprio_dim = 0 if self.proprio_statistics is None else len(self.proprio_statistics.low)
        given = (sizes, proprio_dim, attention, self.action_dim if self.variant == "l1" else 0)
        try:
            with torch.device("meta"):
                pretrained.refuse_larger(OpenVLAModel(*given), tensors, path)
            self.model = OpenVLAModel(*given)
        except CheckpointError:
            raise
        except (ValueError, TypeError, ArithmeticError, RuntimeError, ImportError) as error:
            raise ConfigError(f"{path}: policy.attention='{attention}' or its config.json: {error}") from error
        self._origin = replace(from_public(self.model, tensors, path), beside=beside)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        return check_public(arguments, context, "openvla_oft")

    @classmethod
    def to_clone(
        cls,
        start: CloneStart,
        base: str = "",
        keep_statistics: bool = False,
        lora_rank: int = 0,
        variant: str = "oft",
        correlation: float | None = None,
        temperature: float | None = None,
    ) -> "OpenVLAPolicy":
        """One with the weights of ``base``, or a tiny random one."""
        windows, sizes = start.windows, dict[str, Any](action_chunk=start.num_knots, **start.sizes)
        own: dict[str, Any] = dict(lora_rank=lora_rank, variant=variant)
        own |= dict(correlation=correlation, temperature=temperature)
        if len(windows.views) > 1:
            own["num_images_in_input"] = len(windows.views)
        if (state := windows.state_statistics()) is not None:
            own["use_proprio"] = True
        if base:
            sizes |= recorded_settings(base, windows.actions_B_A_D, keep_statistics=keep_statistics)
            return cls(base, **sizes, **own)
        sentences, statistics = sorted(set(windows.tasks)), {"action": windows.statistics()}
        if state is not None:
            statistics["proprio"], sizes["proprio_dim"] = state, len(state["q01"])
        write_tiny(start.folder, seed=start.seed, statistics=statistics, sentences=sentences, bins=TINY_BINS, **sizes)
        return cls(str(start.folder), **own)

    @property
    def network(self) -> OpenVLAModel:
        return self.model

    @property
    def chunk(self) -> int:
        """Steps of a decision."""
        return self.num_actions * self.hold

    # --- deciding

    @torch.no_grad()
    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        if self.variant == "l1" and mode == "sample":
            raise ConfigError(NO_PROBABILITY)
        record = self._inputs(observation)
        seen = self._seen(record)
        if self.variant == "l1":
            return Decision(self._executed(self._regressed(seen, record)), record)
        heat = self.temperature * temperature if mode == "sample" else 0.0
        num = self.num_actions * self.action_dim
        draws_E_KN = seen.new_zeros(len(seen), num, dtype=torch.float32)  # of a greedy decision, which draws nothing
        if heat > 0:
            draws_E_KN = self._draws(generators).to(seen.device)
        if self.variant == "oft":
            logits = self.model.parallel_logits(seen, record["ids"], record["length"], num)
            chosen, log_prob = _chosen(logits[..., self.tokens.ids], draws_E_KN, heat)
        else:
            chosen, log_prob = self._one_by_one(seen, record, draws_E_KN, heat)
        shape = (self.num_actions, self.action_dim)
        record["responses"] = chosen.unflatten(1, shape).short()
        return Decision(
            self.actions(record["responses"]), record, log_prob.unflatten(1, shape) if mode == "sample" else None
        )

    def _draws(self, generators: Generators) -> Tensor:
        """Uniform numbers, which choose tokens."""
        shape = (self.num_actions, self.action_dim)
        if self.correlation == 0:
            draws = [torch.rand(shape, generator=each, device=each.device) for each in generators]
            return torch.stack(draws).flatten(1)
        normal = torch.stack([torch.randn(shape, generator=each, device=each.device) for each in generators])
        return torch.special.ndtr(correlated(normal, self.correlation)).flatten(1)

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        if self.variant == "l1":
            raise ConfigError(NO_PROBABILITY)
        chosen = record["responses"].flatten(1).long()
        seen = self._seen(record)
        prompt = (record["ids"], record["length"])
        if self.variant == "oft":
            logits = self.model.parallel_logits(seen, *prompt, chosen.shape[1])
        else:
            logits = self.model.forced_logits(seen, *prompt, chosen + self.tokens.ids.start)
        found = inputs.token_log_probs(logits[..., self.tokens.ids], chosen, self.temperature)
        log_prob, entropy = (value.unflatten(1, (self.num_actions, self.action_dim)) for value in found)
        return LogProb(log_prob, entropy)

    def actions(self, responses_E_K_N: Tensor) -> Tensor:
        """Executed actions, float32 [E, K * hold, N], of tokens counted from the first of actions."""
        return self._executed(self.tokens.decode(responses_E_K_N.long() + self.tokens.ids.start))

    def _executed(self, normalized_E_K_N: Tensor) -> Tensor:
        actions = with_gripper(self.statistics.unnormalized(normalized_E_K_N), self.gripper)
        return actions.float().repeat_interleave(self.hold, dim=1)

    def _regressed(self, seen: Tensor, record: Mapping[str, Tensor]) -> Tensor:
        num = self.num_actions * self.action_dim
        return self.model.regressed(seen, record["ids"], record["length"], num).float()

    def _one_by_one(
        self, seen: Tensor, record: Mapping[str, Tensor], draws_E_N: Tensor, heat: float
    ) -> tuple[Tensor, Tensor]:
        first, log_probs = self.tokens.ids.start, []

        def choose(k: int, logits: Tensor) -> Tensor:
            chosen, log_prob = _chosen(logits[:, self.tokens.ids], draws_E_N[:, k], heat)
            log_probs.append(log_prob)
            return chosen + first

        chosen = self.model.decoded(seen, record["ids"], record["length"], draws_E_N.shape[1], choose) - first
        return chosen, torch.stack(log_probs, dim=1)

    # --- what it sees

    def _inputs(self, observation: Observation) -> dict[str, Tensor]:
        """All that a decision depends on, pictures as uint8."""
        device = self.model.projector.fc1.weight.device
        views = [observation["full_image"], *observation["wrist_image"].unbind(1)]
        if len(views) < self.num_views:
            raise ConfigError(
                f"policy.num_images_in_input={self.num_views}, but the environment has {len(views)} views."
            )
        resized = [self.preprocessor.resized(view[:, None]) for view in views[: self.num_views]]
        ids, length = self.prompts.batch(observation["task_description"])
        found = {"pixels": torch.cat(resized, dim=1), "ids": ids, "length": length}
        if self.proprio_statistics is not None:
            state, dim = observation["state"], len(self.proprio_statistics.low)
            if state.shape[-1] != dim:
                raise ConfigError(
                    f"policy.use_proprio: the environment's state has {state.shape[-1]} numbers, the statistics of"
                    f" '{self.unnorm_key}' are of {dim}: set policy.unnorm_key, or give weights of this robot."
                )
            found["proprio"] = self.proprio_statistics.normalized(state).float()
        return {name: value.to(device) for name, value in found.items()}

    def _seen(self, record: Mapping[str, Tensor]) -> Tensor:
        return self.model.seen(self.preprocessor.normalized(record["pixels"]), record.get("proprio"))

    # --- cloning

    def record_of(self, observation: Observation, actions_B_A_D: Tensor) -> dict[str, Tensor]:
        """The record of a demonstrator who saw this and did these actions; held ones are the mean of what they hold."""
        held = actions_B_A_D.unflatten(1, (self.num_actions, self.hold)).mean(dim=2)
        normalized = self.statistics.normalized(without_gripper(held, self.gripper))
        inputs = self._inputs(observation)
        device = inputs["ids"].device
        if self.variant == "l1":
            return {**inputs, "actions": normalized.float().to(device)}
        ids = self.tokens.encode(normalized) - self.tokens.ids.start
        return {**inputs, "responses": ids.clamp(0, self.tokens.bins - 1).short().to(device)}

    def shares_outside(self, actions_B_A_D: Tensor) -> Tensor:
        """The share of each number of a demonstrator's actions that is clipped [D]."""
        is_outside = self.statistics.is_outside(without_gripper(actions_B_A_D, self.gripper))
        return is_outside.double().mean(dim=(0, 1))

    def cloning_loss(self, record: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The negative log-probability of a token, of l1 the distance of a number; nothing is drawn."""
        if self.variant == "l1":
            return (self._regressed(self._seen(record), record) - record["actions"]).abs().mean()
        return -self.log_prob(record).log_prob_B_K_N.mean()

    # --- files

    def save(self, folder: Path) -> None:
        """Write its public folder, complete with what nothing reads; adapters are added to their weights. Settings and
        statistics that were given in place of the folder's are in its files."""
        tensors = to_public(merged_state(self.model), self._origin)
        write_folder(Path(folder), tensors, self.folder.small_files(), beside=self._origin.beside)
        given = {KEYS.get(name, name): self.arguments[name] for name in RECORDED if self.arguments[name] is not None}
        for name, content in ((CONFIG, given), (STATISTICS, self._own_statistics)):
            if content:
                whole = {**json_in(self.folder.address, CONFIG), **content} if name == CONFIG else content
                storage.write_text(Path(folder) / name, json.dumps(whole, indent=1) + "\n")


def recorded_settings(path: str, actions_B_A_D: Tensor, *, keep_statistics: bool) -> dict[str, Any]:
    """Arguments with which a policy of ``path`` executes actions such as these: the gripper's form, and without
    ``keep_statistics`` the statistics.

    A gripper of LIBERO takes -1 and 1 alone; another last number is a robot's own and stays as it is.
    """
    folder = Folder(path)
    config = json_in(path, CONFIG)
    key, _ = _known_statistics(folder, config, "")
    gripper = inputs.default_gripper(config, key)
    if gripper == "libero" and not (actions_B_A_D[..., -1].abs() == 1).all():
        log.info("%s has the gripper of LIBERO, -1 or 1, but these recordings have others: policy.gripper=as_is", path)
        gripper = "as_is"
    if keep_statistics:
        return {"gripper": gripper}
    mask = [True] * (actions_B_A_D.shape[2] - 1) + [gripper == "as_is"]  # open and closed are 1 and 0 already
    rows = without_gripper(actions_B_A_D, gripper).flatten(0, 1)
    return {"gripper": gripper, "statistics": usual_statistics(rows, mask).to_dict()}


def _known_statistics(folder: Folder, config: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]]:
    """`Folder.statistics`, or nothing where there are none, or several of which none is named."""
    try:
        return folder.statistics(config, key)
    except CheckpointError:
        return "", {}


def _settings(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given, else those of config.json, else as published."""
    recorded = {name: config.get(KEYS.get(name, name), usual) for name, usual in USUAL.items()}
    found = {name: value if given[name] is None else given[name] for name, value in recorded.items()}
    for name in COUNTS[given["variant"] == "autoregressive" :]:  # which has no action_chunk
        if type(found[name]) is not int or not 1 <= found[name] <= MOST:
            raise ConfigError(f"policy.{name}={found[name]!r} must be a whole number from 1 to {MOST}.")
    if not isinstance(correlation := found["correlation"], int | float) or not 0 <= correlation < 1:
        raise ConfigError(f"policy.correlation={correlation!r} must be at least 0, and below 1.")
    if not isinstance(temperature := found["temperature"], int | float) or not 0 < temperature < math.inf:
        raise ConfigError(f"policy.temperature={temperature!r} must be above 0; evaluation is greedy by --mode.")
    return found


def _chosen(logits: Tensor, draws: Tensor, heat: float) -> tuple[Tensor, Tensor]:
    """The likeliest of the last dimension, or with ``heat`` the one that a uniform number falls upon; and the logarithm
    of its probability, which is 1 without heat."""
    if heat == 0:
        chosen = logits.argmax(dim=-1)
        return chosen, torch.zeros_like(chosen, dtype=torch.float32)
    log_prob = torch.log_softmax(logits.float() / heat, dim=-1)
    reached = log_prob.exp().cumsum(dim=-1)
    chosen = (reached < draws[..., None] * reached[..., -1:]).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    return chosen, log_prob.gather(-1, chosen[..., None])[..., 0]
