# SPDX-License-Identifier: Apache-2.0
"""Our network against diffusers' CosmosTransformer3DModel: same weights, equal outputs, times of one paired run.

python -m benchmarks.dit [--quick] [--threads N] [--rounds N] [--case NAME]

Each round times both networks, one right after the other in alternating order, so that what else the machine does
meets both. The figure is the median over rounds of diffusers' time over ours. The ceiling is the fastest matrix
product found on this machine with as many threads; shares count the operations of the formulas, forward and three times
that for forward and backward. On a GPU, in bfloat16.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import machine
from cosmos_predict2.checkpoints.diffusers_names import diffusers_config, to_diffusers_name
from cosmos_predict2.checkpoints.verify import stand_in_for_torchvision
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.nn.layers import product

LARGEST_DIFFERENCE = 1e-5  # relative to the largest output, in float32


@dataclass(frozen=True)
class Case:
    """A size of network and batch."""

    name: str
    net: dict[str, Any]
    batch: int
    latent_shape: tuple[int, int, int]
    text_tokens: int = 64
    per_frame_times: bool = False

    @property
    def tokens(self) -> int:
        t, h, w = self.latent_shape
        return t * h * w // 4


WIDE = dict(model_channels=512, num_heads=4, num_blocks=4, adaln_lora_dim=64, crossattn_emb_channels=256)
TINY = dict(model_channels=128, num_heads=2, num_blocks=4, adaln_lora_dim=32, crossattn_emb_channels=64)
RELEASED = dict(model_channels=2048, num_heads=16, num_blocks=28, adaln_lora_dim=256, crossattn_emb_channels=1024)
ON_CPU = [
    Case("width 512, 1 x 1280 tokens", WIDE, 1, (5, 32, 32)),
    Case("width 512, 1 x 1280 tokens, a time per frame", WIDE, 1, (5, 32, 32), per_frame_times=True),
    Case("width 128, 16 x 64 tokens", TINY, 16, (4, 8, 8)),
    Case("width 128, 16 x 64 tokens, a time per frame", TINY, 16, (4, 8, 8), per_frame_times=True),
]
ON_GPU = [
    Case("2B, 768 x 432 x 13", RELEASED, 1, (4, 54, 96), 512, per_frame_times=True),
    Case("2B, 768 x 432 x 61", RELEASED, 1, (16, 54, 96), 512, per_frame_times=True),
    Case("2B, 1280 x 704 x 93", RELEASED, 1, (24, 88, 160), 512, per_frame_times=True),
]


def diffusers_twin(net: DiT, options: dict[str, Any]) -> nn.Module:
    """diffusers' network with the weights of ours, which was built with ``options``."""
    stand_in_for_torchvision()
    from diffusers import CosmosTransformer3DModel

    config = diffusers_config(options, has_condition_mask=net.has_condition_channel)
    with torch.device(next(net.parameters()).device):
        twin: nn.Module = CosmosTransformer3DModel(
            **{key: value for key, value in config.items() if not key.startswith("_")}
        )
    if net.dtype != torch.float32:
        twin = twin.to(net.dtype)
    renamed = {to_diffusers_name(name): weight for name, weight in net.state_dict().items()}
    twin.load_state_dict({name: weight for name, weight in renamed.items() if name is not None})
    for name, module in twin.named_modules():
        if name.endswith(("norm_q", "norm_k")):
            module.eps = 1e-6  # as the released weights were trained; diffusers has 1e-5
    return twin


def networks(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Video2WorldDiT, nn.Module]:
    """Ours, with random weights in every part, and diffusers' with the same ones."""
    torch.manual_seed(0)
    options = dict(case.net, rope_h_extrapolation_ratio=3.0, rope_w_extrapolation_ratio=3.0)
    with torch.device(device):
        ours = Video2WorldDiT(**options)
        for name, parameter in ours.named_parameters():
            if "adaln_modulation" in name:  # zero in a fresh network: half of it would add nothing
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    ours = ours.to(dtype)
    return ours, diffusers_twin(ours, options)


def calls(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The forward passes of both networks on one input."""
    ours, theirs = networks(case, device, dtype)
    t, h, w = case.latent_shape
    size = (case.batch, 1, t, h, w)
    with torch.device(device):
        x = torch.randn(case.batch, 16, t, h, w, dtype=dtype)
        text = torch.randn(case.batch, case.text_tokens, case.net["crossattn_emb_channels"], dtype=dtype)
        times = torch.rand(case.batch, t if case.per_frame_times else 1, dtype=dtype)
        mask = torch.zeros(size, dtype=dtype)
        mask[:, :, 0] = 1
        padding = torch.zeros(1, 1, 8 * h, 8 * w, dtype=dtype)
    their_times = times[:, None, :, None, None] if case.per_frame_times else times[:, 0]

    def run_ours() -> Tensor:
        out: Tensor = ours(x, times, text, condition_mask_B_1_T_H_W=mask, padding_mask_B_1_H_W=padding)
        return out

    def run_theirs() -> Tensor:
        out: tuple[Tensor] = theirs(
            x, their_times, text, condition_mask=mask, padding_mask=padding, fps=None, return_dict=False
        )
        return out[0]

    return run_ours, run_theirs


def backward_of(run: Callable[[], Tensor]) -> Callable[[], None]:
    return lambda: run().square().mean().backward()  # type: ignore[no-any-return, no-untyped-call]


def check_equal(case: Case, run_ours: Callable[[], Tensor], run_theirs: Callable[[], Tensor]) -> float:
    """The largest difference of the outputs relative to the largest output; raises if the networks differ."""
    with torch.no_grad():
        ours, theirs = run_ours().float(), run_theirs().float()
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    allowed = LARGEST_DIFFERENCE if run_ours().dtype == torch.float32 else 5e-2
    if not difference <= allowed:
        raise SystemExit(f"{case.name}: the outputs differ by {difference:.1e}, more than {allowed:.0e}.")
    return difference


def product_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The most operations per second that a square matrix product reaches here, by PyTorch's own and by ours."""
    ways: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.matmul, product)
    best = [0.0, 0.0]
    for n in (512, 1024, 2048) if device.type == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        for _ in range(12):  # in turns, so that what else the machine does meets both
            for i, multiply in enumerate(ways):
                best[i] = max(best[i], 2 * n**3 / machine.seconds(partial(multiply, a, b)))
    return best[0], best[1]


def ceiling() -> float:
    """The most operations per second that a square matrix product reaches here, which is printed."""
    device, dtype = machine.device_and_dtype()
    peak = max(product_rates(device, dtype))
    print(f"{machine.described(device)}: {dtype} matrix products reach {peak / 1e12:.3g} TFLOP/s", flush=True)
    return peak


def report(case: Case, device: torch.device, dtype: torch.dtype, peak: float, rounds: int) -> None:
    """Print the rows of a case: how many times as fast ours is."""
    run_ours, run_theirs = calls(case, device, dtype)
    difference = check_equal(case, run_ours, run_theirs)
    print(f"{case.name}   (outputs differ by {difference:.1e})")
    with torch.device("meta"):
        net = Video2WorldDiT(**case.net)
    rows = case.latent_shape[0] if case.per_frame_times else 1
    sizes: dict[str, Any] = dict(text_tokens=case.text_tokens, timestep_rows=rows, batch_size=case.batch)
    flops = forward_flops(net, case.latent_shape, **sizes).total
    ways: list[tuple[str, Callable[[Any], Any], int]] = [("forward", torch.no_grad(), 1)]
    for name, wrap, factor in [*ways, ("forward + backward", backward_of, 3)]:
        try:
            found = machine.in_turns({"ours": wrap(run_ours), "theirs": wrap(run_theirs)}, rounds, 3)
        except torch.OutOfMemoryError:
            print(f"  {name:19s} does not fit into this GPU (nothing is recomputed)")
            gc.collect()  # what the exception held
            continue
        ratio, a, b = found.ratio("theirs", "ours"), found.median("ours"), found.median("theirs")
        rates = [factor * flops / seconds for seconds in (a, b)]
        print(
            f"  {name:19s} ours {a * 1e3:8.2f} ms ({rates[0] / 1e9:7.0f} GFLOP/s, {rates[0] / peak:4.0%})   "
            f"diffusers {b * 1e3:8.2f} ms ({rates[1] / peak:4.0%})   {ratio:.2f} times as fast"
        )


def main() -> None:
    parser = machine.parser(__doc__, "quick", "threads", "rounds")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = machine.parse(parser)
    device, dtype = machine.device_and_dtype()
    rounds = arguments.rounds or (6 if arguments.quick else 40)
    torchs, ours = product_rates(device, dtype)
    peak = max(torchs, ours)
    print(f"{machine.described(device)}, {dtype}: matrix products reach {peak / 1e9:.0f} GFLOP/s")
    print(f"  PyTorch's own {torchs / 1e9:.0f}, ours {ours / 1e9:.0f}", end="")
    print("   OURS IS SLOWER: report this processor" if ours < 0.9 * torchs else "")
    cases = [case for case in (ON_GPU if device.type == "cuda" else ON_CPU) if arguments.case in case.name]
    if not cases:
        sys.exit(f"No case contains '{arguments.case}'.")
    for case in cases:
        report(case, device, dtype, peak, rounds)


if __name__ == "__main__":
    main()
