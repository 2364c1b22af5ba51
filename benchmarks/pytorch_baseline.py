"""The same training step in plain PyTorch on one GPU: the baseline of `benchmark_gpu.py --torch`.

    python benchmarks/pytorch_baseline.py --dp 1 --mp 1 --model gpt2_xl --batch 8
    python benchmarks/pytorch_baseline.py --dp 1 --mp 1 --emulate

Idiomatic PyTorch: torch.compile, scaled_dot_product_attention, autocast to bfloat16 over float32 parameters, fused
AdamW; one matmul for q, k and v, and one for gate and up.  Autograd decides what is saved; model.remat is ignored.
--emulate runs a small model on the CPU, in float32, not compiled.

B batch, T time, D model width, H heads, N key/value heads, K head dim, F ffn.
"""

import itertools
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmark_gpu import configuration
from measuring import WARM_UP, step_parser
from model_options import refuse_options

from shmap_tp.config.choices import AttentionKernel, Block, Mlp, Norm, PositionKind, Remat
from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.config.values import padded_vocabulary
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, table_peak
from shmap_tp.plan.flags import append_json
from shmap_tp.plan.report import Row, config_fields, format_row
from shmap_tp.runtime.command_line import run_command

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed; see pytorch.org, or omit --torch")


def norm(config: ModelConfig) -> nn.Module:
    if config.norm == Norm.layernorm:
        return nn.LayerNorm(config.width, eps=1e-5, bias=False)
    return nn.RMSNorm(config.width, eps=1e-6)


class Rotary(nn.Module):
    """Rotary position embedding of the pairs (k, k + K/2)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        half = config.head_dim // 2
        angle = torch.arange(config.context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)[None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        a, b = x_BHTK.float().chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x_BHTK.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = [config.heads, config.kv_heads, config.kv_heads]
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.width, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.rotary = Rotary(config) if config.positions == PositionKind.rotary else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads_BHTK = self.qkv(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads_BHTK.split(self.heads, dim=1)
        shared = self.heads[0] != self.heads[1]
        y_BHTK = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True, enable_gqa=shared)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.mlp == Mlp.swiglu
        self.up = nn.Linear(config.width, (1 + self.gated) * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        gate, up = self.up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.parallel = config.block == Block.parallel
        self.attention_norm, self.attention, self.mlp = norm(config), Attention(config), FeedForward(config)
        self.mlp_norm = None if self.parallel else norm(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.attention_norm(x_BTD)
        if self.parallel:
            return x_BTD + self.attention(h_BTD) + self.mlp(h_BTD)
        x_BTD = x_BTD + self.attention(h_BTD)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Model(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        refuse_options(config, "the PyTorch baseline")
        if config.positions == PositionKind.alibi:
            raise UserError("the fused attention of PyTorch has no ALiBi; use model.positions=rotary or learned")
        rows = padded_vocabulary(config)
        self.vocabulary = config.vocabulary
        self.embedding = nn.Embedding(rows, config.width)
        learned = config.positions == PositionKind.learned
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, rows, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=config.init_std * ((2 * config.layers) ** -0.5 if last else 1))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """ids[B T+1] -> mean cross entropy of the T targets."""
        x_BTD = self.embedding(tokens_BT[:, :-1])
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: x_BTD.shape[1]]
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits = self.head(self.norm(x_BTD))[..., : self.vocabulary]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


def optimizer(model: Model, config: Config) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    settings, weights = config.optimizer, list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights if w.ndim != 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon, fused=True)


def measure(config: Config, steps: int, *, emulated: bool) -> Row:
    """Compile, run WARM_UP steps, then time `steps` more with the device's own clock."""
    device = torch.device("cpu" if emulated else "cuda")
    kind = "cpu" if emulated else torch.cuda.get_device_name()
    torch.manual_seed(0)
    with device:
        model = Model(config.model)
        shape = (config.train.microbatches, -1, config.model.context + 1)
        size = (config.train.batch, config.model.context + 1)
        tokens_ABT = torch.randint(config.model.vocabulary, size).view(shape)
    adamw = optimizer(model, config)
    loss_of = model if emulated else torch.compile(model)

    def step() -> None:
        for tokens_BT in tokens_ABT:
            with torch.autocast(device.type, torch.bfloat16, enabled=not emulated):
                loss = loss_of(tokens_BT) / config.train.microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    start = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    seconds = _on_cpu(step, steps) if emulated else _on_gpu(step, steps)
    without_remat = replace(config, model=replace(config.model, remat=Remat.none, offload=[]))
    fields = config_fields(without_remat, AttentionKernel.cudnn, 1, table_peak(kind, 1)) | {
        "attention": "scaled_dot_product_attention",
        "kind": "emulated" if emulated else "measured",
        "program": "pytorch",
        "device_kind": kind,
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "peak_bytes_per_device": None if emulated else torch.cuda.max_memory_allocated(),
        "limit_bytes_per_device": DEVICES[kind].memory if kind in DEVICES else None,
        "compile_seconds": time.perf_counter() - start - sum(seconds),
        "versions": {"torch": torch.__version__},
        "command": shlex.join(["python", "benchmarks/pytorch_baseline.py", *sys.argv[1:]]),
    }
    return Row(**fields, chips=1, slices=1, topology=None, tile=None, fits=True)


def _on_cpu(step: Callable[[], None], steps: int) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(ends)]


def _on_gpu(step: Callable[[], None], steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]


def run(arguments: Namespace) -> None:
    config = configuration(arguments)
    if config.mesh.devices > 1:
        raise UserError("the PyTorch baseline runs on one GPU; use --dp 1 --mp 1")
    if not arguments.emulate and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU; run on the CPU with --emulate")
    row = measure(config, arguments.steps, emulated=arguments.emulate)
    print(format_row(row))
    if arguments.json:
        append_json(row.to_json(), Path(arguments.json))


if __name__ == "__main__":
    parsed = step_parser(__doc__).parse_intermixed_args()
    sys.exit(run_command(lambda: run(parsed)))
