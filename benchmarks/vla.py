# SPDX-License-Identifier: Apache-2.0
"""Iterations of reinforcement learning of vision-language-action policies: speed, shares, and the passes of OpenVLA.

    python -m benchmarks.vla [--envs 32] [--groups_of 8] [--threads 1] [--rounds 3]
    python -m benchmarks.vla --released [--policies openvla pi05] [--adapters] [--size tiny]

The first table has iterations of tiny policies in the toy world's simulator and in the tiny world model (one evaluation
a chunk). It counts decisions a second while the policy decides, steps a second while the environment steps, and steps a
second of the whole; then the shares of time. "transfer" lies between environment and network: pictures brought to size,
prompts, and their way to the device. "update" is four minibatches, with the probabilities before them.

The second pairs passes of OpenVLA with the plain way, all logits of transformers' `LlamaForCausalLM` over whole rows,
whose slice of action tokens is taken afterwards; the autoregressive decision computes the row anew for each token
there. Both ways give the same numbers, which is checked. The widths are small, the vocabulary is that of LLaMA-2.
`--released` measures a whole experience of the published policies in place of all this: `benchmarks.experience`.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.imagination import Loop, Parts, imagined
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.openvla.inputs import ActionTokens, token_log_probs
from cosmos_predict2.rl.policies.openvla.model import PLACEHOLDER, OpenVLAModel, OpenVLASizes, Tower, rows
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from imaginaire.config import L

PARTS = ("policy", "transfer", "simulator", "update")
EPISODE = 24
ACTIONS: dict[str, Any] = dict(hold=3)  # four actions of a decision, each for three steps
PLAIN, OURS = "plain transformers", "this project"


# --- iterations


def policies(root: Path) -> dict[str, Any]:
    """Nodes of random tiny policies."""
    tiny_openvla.write_tiny(root / "openvla", action_chunk=4, action_dim=4, bins=32, **ACTIONS)
    tiny_pi05.write_tiny(root / "pi05", action_horizon=4, **ACTIONS)
    return {
        "OpenVLA-OFT": L(OpenVLAPolicy)(path=str(root / "openvla")),
        "PI0.5": L(Pi05Policy)(path=str(root / "pi05")),
        "PI0.5, expert only": L(Pi05Policy)(path=str(root / "pi05"), train_expert_only=True),
    }


ENVIRONMENTS: dict[str, Callable[..., Any]] = {
    "simulator": L(ToyEnv),
    "imagination": partial(L(imagined), way="+ one evaluation", num_steps=EPISODE),
}


def parts_of(model: Any) -> Parts:
    yield "policy", model.net, "act"
    yield "transfer", model.net, "_inputs" if hasattr(model.net, "_inputs") else "seen"
    yield "simulator", model.env, "reset"
    yield "simulator", model.env, "chunk_step"


def iterations(num_envs: int, members: int, rounds: int) -> None:
    print(f"\n{num_envs} environments, {EPISODE} steps, groups of {members}")
    with tempfile.TemporaryDirectory() as folder:
        nodes = policies(Path(folder))
        rl = VLARLConfig(group_size=members, minibatches=4, loss=PolicyLossConfig(ratio_level="chunk"))
        for place, env in ENVIRONMENTS.items():
            node, groups = env(num_envs=num_envs), num_envs // members
            loops = {name: Loop(policy, node, groups, rl, parts_of) for name, policy in nodes.items()}
            seconds = machine.in_turns({name: loop.iterate for name, loop in loops.items()}, rounds, warm_up=0)
            for name, loop in loops.items():
                spent, steps = loop.shares.seconds, num_envs * EPISODE
                total, chunk = sum(spent.values()), int(loop.model.net.chunk)  # type: ignore[arg-type]
                of_policy = rounds * steps / chunk / (spent["policy"] + spent["transfer"])
                parts = "  ".join(f"{part} {spent[part] / total:.0%}" for part in PARTS)
                of_env, whole = rounds * steps / spent["simulator"], steps / seconds.median(name)
                speeds = f"{of_policy:6.0f} decisions/s {of_env:7.0f} env steps/s  all {whole:6.0f} steps/s"
                print(f"  {place:11} {name:18} {speeds}  {parts}", flush=True)


# --- passes


class LanguagePasses:
    """OpenVLA on rows of prompts of several lengths, in the plain way and in this project's."""

    def __init__(self, width: int, layers: int, batch: int, num: int) -> None:
        device, dtype = machine.device_and_dtype()
        text = dict(vocab_size=32064, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
        text |= dict(num_attention_heads=8, max_position_embeddings=1024, pad_token_id=0)
        towers = (Tower(64, 3, 4, 14, reg_tokens=4), Tower(64, 3, 4, 14))
        torch.manual_seed(0)
        sizes = OpenVLASizes(112, *towers, text, vocabulary=32000, bins=256, stop_id=2, pad_id=0)
        self.model = OpenVLAModel(sizes).to(device, dtype)
        self.tokens, self.num = ActionTokens(32000, 256).ids, num
        self.length = torch.randint(16, 33, (batch,)).to(device)
        self.prompt = torch.randint(3, 31000, (batch, 32)).to(device)
        self.pixels = torch.randn(batch, 6, 112, 112).to(device, dtype)
        self.chosen = torch.randint(256, (batch, num)).to(device)

    def plain(self) -> Tensor:
        """Log-probabilities from all logits of whole rows, as `LlamaForCausalLM` gives them."""
        after = self.prompt.new_full((len(self.prompt), self.num + 1), PLACEHOLDER)
        after[:, self.num] = self.model.sizes.stop_id
        ids, valid = rows(self.prompt, self.length, after, self.model.sizes.pad_id)
        place = torch.arange(ids.shape[1], device=self.length.device) - self.length[:, None]
        embedded = self.model.language_model.get_input_embeddings()(ids)
        embedded = embedded * ~((place >= 0) & (place < self.num))[..., None]
        seen = self.model.seen(self.pixels, None)
        embedded = torch.cat([embedded[:, :1], seen, embedded[:, 1:]], dim=1)
        valid = torch.cat([valid.new_ones(seen.shape[:2]), valid], dim=1)
        mask = torch.zeros_like(valid, dtype=embedded.dtype).masked_fill(~valid, torch.finfo(embedded.dtype).min)
        logits = self.model.language_model(
            inputs_embeds=embedded,
            attention_mask=mask[:, None, None].expand(-1, 1, valid.shape[1], -1),
            position_ids=torch.arange(valid.shape[1], device=valid.device)[None],
            use_cache=False,
        ).logits
        index = (seen.shape[1] + self.length - 1)[:, None] + torch.arange(self.num, device=valid.device)
        of_actions = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
        return token_log_probs(of_actions[..., self.tokens], self.chosen, 1.6)[0]

    def ours(self) -> Tensor:
        seen = self.model.seen(self.pixels, None)
        logits = self.model.parallel_logits(seen, self.prompt, self.length, self.num)
        return token_log_probs(logits[..., self.tokens], self.chosen, 1.6)[0]

    def learnt(self, way: Callable[[], Tensor]) -> Tensor:
        found = way()
        self.model.zero_grad()
        found.mean().backward()
        return found.detach()

    def _greedy(self, k: int, logits: Tensor) -> Tensor:
        chosen: Tensor = logits[:, self.tokens].argmax(dim=-1) + self.tokens.start
        return chosen

    @torch.no_grad()
    def plain_decision(self) -> Tensor:
        """Seven tokens, each from the whole row so far."""
        seen, chosen = self.model.seen(self.pixels, None), torch.zeros_like(self.chosen[:, :7])
        for k in range(7):
            logits = self.model.forced_logits(seen, self.prompt, self.length, chosen[:, : k + 1])
            chosen[:, k] = self._greedy(k, logits[:, -1])
        return chosen

    @torch.no_grad()
    def our_decision(self) -> Tensor:
        seen = self.model.seen(self.pixels, None)
        return self.model.decoded(seen, self.prompt, self.length, 7, self._greedy)

    def pairs(self) -> Iterator[tuple[str, dict[str, Callable[[], Tensor]]]]:
        yield "log-probabilities", {PLAIN: torch.no_grad()(self.plain), OURS: torch.no_grad()(self.ours)}
        yield "... with gradients", {PLAIN: lambda: self.learnt(self.plain), OURS: lambda: self.learnt(self.ours)}
        yield "autoregressive decision", {PLAIN: self.plain_decision, OURS: self.our_decision}


def passes(width: int, layers: int, batch: int, rounds: int) -> None:
    """Print the pairs: the times that this project is faster."""
    print(f"\nOpenVLA of width {width}, {layers} layers, batch {batch}, 56 action tokens, a vocabulary of 32,064")
    exact = machine.device_and_dtype()[1] == torch.float32
    for name, ways in LanguagePasses(width, layers, batch, 56).pairs():
        one, other = (way() for way in ways.values())
        away = float((one - other).abs().max())
        if not away < (1e-4 if exact else 0.1):  # NaN, too
            raise SystemExit(f"{name}: the ways differ by {away}")
        seconds = machine.in_turns(ways, rounds)
        each = "  ".join(f"{way} {1e3 * seconds.median(way):.0f} ms" for way in ways)
        print(f"  {name:24} {each}  {seconds.ratio(PLAIN, OURS):.2f} x  (differ by {away:.1e})", flush=True)


def main() -> None:
    parser = machine.parser(__doc__, "threads", "rounds")
    parser.add_argument("--envs", type=int, help="default: 32, of --released 16")
    parser.add_argument("--groups_of", type=int, default=8)
    released = parser.add_argument_group("--released")
    released.add_argument("--released", action="store_true", help="a whole experience of the published policies")
    released.add_argument("--policies", nargs="*", default=["openvla", "pi05"], choices=("openvla", "pi05"))
    released.add_argument("--size", default="2B", choices=("tiny", "2B"), help="of policies and world model")
    released.add_argument("--adapters", action="store_true", help="train adapters of rank 32 in place of the weights")
    released.add_argument("--experiences", type=int, help="rollouts with updates; default: 2 of openvla, 1 of pi05")
    released.add_argument("--decisions", type=int, help="of an episode; default: 2 of openvla, 8 of pi05")
    released.add_argument("--folder", help="where policies are written for a while; default: the temporary folder")
    released.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the configuration")
    args = machine.parse(parser)
    if args.released:
        from benchmarks import experience  # which imports the trainer

        args.envs = args.envs or 16
        raise SystemExit(experience.run(args))
    device, dtype = machine.device_and_dtype()
    rounds = args.rounds or 3
    print(f"{machine.described(device)}, {dtype}")
    iterations(args.envs or 32, args.groups_of, rounds)
    for width in (256, 512):
        passes(width, 4, 8, rounds)


if __name__ == "__main__":
    main()
