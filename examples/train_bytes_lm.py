"""Trains a small language model of bytes with `kda_core.nn.KimiDeltaAttention`, on a CPU or a GPU.

    python examples/train_bytes_lm.py                            # the best backend of this machine; a CPU takes minutes
    python examples/train_bytes_lm.py --resume                   # continues from the last checkpoint
    python examples/train_bytes_lm.py --out runs/gpu --text runs/bytes-lm/text.txt --compare runs/bytes-lm/run.json

The text is the language reference that ships with Python (`pydoc_data.topics`, some 700 kB). It differs between versions of Python:
`--text` trains on the text of another run. Initial weights, batches and the schedule follow from the seed, on every device. Two runs
with the same options therefore differ only by the rounding of their kernels.

The folder `--out` gets text.txt, checkpoint.pt, run.json (options, losses, backends) and loss.png. The picture needs matplotlib;
`--no-picture` leaves it out, and `--resume` on the finished run draws it later.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_core.errors import KdaError
from kda_core.nn import Cache, KimiDeltaAttention
from kda_core.registry import record_calls

WARMUP, LOWEST_RATE = 0.05, 0.1  # of the steps; of the learning rate
VALIDATION = 0.1  # of the text, its end
VALIDATION_WINDOWS = 32
SMOOTHED = 10  # steps whose mean loss is drawn and compared
PROMPT = b"The following"


class Options(NamedTuple):
    """What determines a run, apart from the text, the device and the backend."""

    steps: int
    batch: int
    tokens: int
    layers: int
    hidden: int
    heads: int
    head_dim: int
    learning_rate: float
    seed: int


HELP = {
    "steps": "optimizer steps",
    "batch": "sequences in a batch",
    "tokens": "bytes in a sequence",
    "layers": "blocks of attention and MLP",
    "hidden": "width of the model",
    "heads": "heads of a layer",
    "head_dim": "K = V of a head; the GPU backends serve 128",
    "learning_rate": "highest learning rate of AdamW",
    "seed": "of the weights and the batches",
}
DEFAULTS = Options(
    steps=400, batch=4, tokens=256, layers=2, hidden=384, heads=2, head_dim=128, learning_rate=2e-3, seed=0
)


# ---- the model


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        width = 64 * math.ceil(hidden * 8 / 3 / 64)
        self.gate, self.up = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, options: Options, layer_idx: int, backend: str | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(options.hidden), nn.RMSNorm(options.hidden)
        self.attention = KimiDeltaAttention(
            options.hidden,
            head_dim=options.head_dim,
            num_heads=options.heads,
            layer_idx=layer_idx,
            backend=backend,
        )
        self.mlp = MLP(options.hidden)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, past_key_values=cache, use_cache=cache is not None)[0]
        return x + self.mlp(self.mlp_norm(x))


class BytesModel(nn.Module):
    """A language model whose tokens are the 256 bytes. The embedding is also the output projection."""

    def __init__(self, options: Options, backend: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, options.hidden)
        self.blocks = nn.ModuleList(Block(options, i, backend) for i in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        scale = 0.02 / math.sqrt(2 * options.layers)  # of what is added to the residual
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                added = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(weight, std=scale if added else 0.02)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the logits [B, T, 256] of the bytes after `ids` [B, T], in fp32. `cache` continues earlier calls."""
        x = self.embed(ids)
        with torch.autocast(x.device.type, torch.bfloat16):
            for block in self.blocks:
                x = block(x, cache)
            return F.linear(self.norm(x), self.embed.weight).float()

    def loss(self, windows: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats of each byte but the first, for `windows` [B, T + 1]."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def sample(model: BytesModel, prompt: bytes, count: int, seed: int, temperature: float = 0.8) -> bytes:
    """Returns `count` bytes after the prompt. Each step computes one token and takes the states of the others from a cache."""
    device, cache = model.embed.weight.device, Cache()
    rng = torch.Generator().manual_seed(seed)
    ids, written = torch.tensor([list(prompt)], device=device), bytearray()
    for _ in range(count):
        logits = model(ids, cache)[0, -1].cpu()
        written.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=rng)))
        ids = torch.tensor([[written[-1]]], device=device)
    return bytes(written)


# ---- the text


def text_of_python() -> bytes:
    """Returns the topics of the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Text(NamedTuple):
    """The bytes to train on and to validate with."""

    train: Tensor
    validation: Tensor
    sha256: str

    @classmethod
    def of(cls, text: bytes) -> Text:
        """Splits a text."""
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = int(len(ids) * (1 - VALIDATION))
        return cls(ids[:cut], ids[cut:], hashlib.sha256(text).hexdigest())


def windows(ids: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Returns ``tokens + 1`` bytes from each start, [B, tokens + 1]."""
    return ids[starts.unsqueeze(1) + torch.arange(tokens + 1)]


def draw_batch(text: Text, options: Options, step: int) -> Tensor:
    """Returns the windows of a step. They follow from the seed and the step alone, so a resumed run draws the same ones."""
    rng = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - options.tokens, (options.batch,), generator=rng)
    return windows(text.train, starts, options.tokens)


@torch.inference_mode()
def validate(model: BytesModel, text: Text, options: Options) -> float:
    """Returns the mean loss of windows that are spread over the validation text."""
    last = len(text.validation) - options.tokens - 1
    starts = torch.linspace(0, last, VALIDATION_WINDOWS).long()
    device = model.embed.weight.device
    parts = windows(text.validation, starts, options.tokens).to(device).split(options.batch)
    return sum(model.loss(part).item() * len(part) for part in parts) / VALIDATION_WINDOWS


# ---- training


def learning_rate(options: Options, step: int) -> float:
    """Returns the rate of a step (from 0): a linear rise, then half a cosine."""
    warmup = math.ceil(WARMUP * options.steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    way = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * (LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * way)) / 2)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


class Run:
    """A training run and what it has measured: run.json without the model and the optimizer."""

    def __init__(self, options: Options, text: Text, device: torch.device, backend: str | None) -> None:
        self.options, self.text, self.device = options, text, device
        torch.manual_seed(options.seed)
        self.model = BytesModel(options, backend).to(device)  # the same weights on every device
        self.optimizer = optimizer_of(self.model)
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.served: dict[str, list[str]] = {}  # entry of a backend -> backends that served it
        self.devices: list[str] = []
        self.seconds, self.timed_steps = 0.0, 0

    @property
    def tokens_per_second(self) -> float:
        """The rate of training, without the first step of each process, which may compile kernels; 0 if there was no other."""
        tokens = self.options.batch * self.options.tokens * self.timed_steps
        return tokens / self.seconds if self.seconds else 0.0

    def step(self) -> float:
        """Makes one optimizer step and returns its loss."""
        done = len(self.losses)
        batch = draw_batch(self.text, self.options, done).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, done)
        with record_calls() as calls:
            loss = self.model.loss(batch)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for call in calls:
            add(self.served.setdefault(call.entry, []), call.backend)
        gpu = self.device.type == "cuda"
        add(self.devices, torch.cuda.get_device_name(self.device) if gpu else "CPU")
        self.losses.append(loss.item())
        return self.losses[-1]

    def train(self, checkpoint: Path, every: int, report: Callable[[Run], None]) -> None:
        """Trains to the last step. Validates and writes a checkpoint every `every` steps and at the end."""
        first = len(self.losses)
        while (done := len(self.losses)) < self.options.steps:
            start = time.perf_counter()
            self.step()
            if done > first:
                self.seconds += time.perf_counter() - start
                self.timed_steps += 1
            if (done + 1) % every == 0 or done + 1 == self.options.steps:
                self.validation.append((done + 1, validate(self.model, self.text, self.options)))
                self.save(checkpoint)
            report(self)

    def identity(self) -> dict[str, Any]:
        """Returns what two runs must share to be continued or compared."""
        return self.options._asdict() | {"text_sha256": self.text.sha256}

    def record(self) -> dict[str, Any]:
        """Returns run.json."""
        return {
            "identity": self.identity(),
            "device": "+".join(self.devices),
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "served": self.served,
            "tokens_per_second": round(self.tokens_per_second),
            "losses": self.losses,
            "validation": self.validation,
        }

    def save(self, path: Path) -> None:
        """Writes a checkpoint. A process that dies meanwhile leaves the previous one."""
        state = {
            "identity": self.identity(), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "losses": self.losses, "validation": self.validation, "served": self.served,
            "devices": self.devices, "seconds": self.seconds, "timed_steps": self.timed_steps,
        }  # fmt: skip
        new = path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, path)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: it belongs to a run with other options or another text.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        check_same(self.identity(), state["identity"], str(path))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.served = state["losses"], state["served"]
        self.devices, self.seconds, self.timed_steps = (
            state["devices"],
            state["seconds"],
            state["timed_steps"],
        )
        self.validation = [(step, loss) for step, loss in state["validation"]]


def add(names: list[str], name: str) -> None:
    """Appends a name that the list lacks."""
    if name not in names:
        names.append(name)


def check_same(own: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Checks that two runs have the same options and text.

    Raises:
        ValueError: the message names the first difference.
    """
    for key, value in own.items():
        if other.get(key) != value:
            hint = f"pass --{key.replace('_', '-')} {other.get(key)}"
            if key == "text_sha256":
                hint = "Python's text differs between versions: use --text"
            raise ValueError(f"{name} has {key}={other.get(key)}, this run has {value}; {hint}")


# ---- reports


def progress(run: Run) -> None:
    """Shows the state of a run: one line that changes in a terminal, otherwise a line for each tenth of the steps."""
    done, steps, width = len(run.losses), run.options.steps, 24
    rate = run.tokens_per_second
    left = (steps - done) * run.options.batch * run.options.tokens / rate if rate else 0.0
    bar = ("#" * (width * done // steps)).ljust(width, ".")
    line = f"step {done:>{len(str(steps))}}/{steps} [{bar}] loss {run.losses[-1]:.3f}"
    line += f"  {rate:,.0f} tokens/s  {int(left) // 60}:{int(left) % 60:02} left" if rate else ""
    if sys.stdout.isatty():
        print(f"\r{line.ljust(90)}", end="\n" if done == steps else "", flush=True)
    elif done % max(1, steps // 10) == 0 or done == steps:
        print(line, flush=True)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the mean of the last `SMOOTHED` losses at each step."""
    return [
        sum(part) / len(part)
        for i in range(len(losses))
        for part in [losses[max(0, i + 1 - SMOOTHED) : i + 1]]
    ]


def name_of(record: dict[str, Any]) -> str:
    """Returns a label for a run, such as "sm90 on NVIDIA H200"."""
    return f"{'+'.join(record['served']['chunk_fwd'])} on {record['device']}"


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the loss curves of runs as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for record, color in zip(records, ("#0072b2", "#d55e00")):
        steps = range(1, len(record["losses"]) + 1)
        axes.plot(steps, record["losses"], color=color, alpha=0.25, linewidth=0.8)
        label = f"{name_of(record)}: training, mean of {SMOOTHED} steps"
        axes.plot(steps, smoothed(record["losses"]), color=color, label=label)
        if record["validation"]:
            axes.plot(*zip(*record["validation"]), "o", color=color, markersize=4, label="validation")
    identity = records[0]["identity"]
    axes.set(
        title=f"Language model of bytes, {records[0]['parameters'] / 1e6:.1f} M parameters, "
        f"{identity['batch']} x {identity['tokens']} bytes a step",
        xlabel="step",
        ylabel="loss (nats per byte)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=96)


def comparison(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns how much the curves of two runs differ."""
    pairs = list(zip(smoothed(own["losses"]), smoothed(other["losses"])))[SMOOTHED - 1 :]
    apart = max((abs(a - b) for a, b in pairs), default=math.nan)
    ends = " and ".join(f"{r['validation'][-1][1]:.4f}" for r in (own, other) if r["validation"])
    return (
        f"{name_of(own)} against {name_of(other)}: the training losses (means of {SMOOTHED} steps) differ by at most "
        f"{apart:.4f}; validation at the end {ends}"
    )


def finish(run: Run, other: dict[str, Any] | None, folder: Path, picture: bool) -> None:
    """Writes run.json and loss.png, and prints the results of a run, beside `other` if that is given."""
    record = run.record()
    for label, entry in (("forward", "chunk_fwd"), ("backward", "chunk_bwd")):
        print(f"{label:<9} served by {', '.join(run.served[entry])}")
    print(f"speed     {run.tokens_per_second:,.0f} tokens/s in training")
    print(f"loss      {smoothed(run.losses)[-1]:.4f} in training, {run.validation[-1][1]:.4f} in validation")
    (folder / "run.json").write_text(json.dumps(record) + "\n")
    print(f"record    {folder / 'run.json'}")
    if picture:
        draw([record] if other is None else [record, other], folder / "loss.png")
        print(f"curve     {folder / 'loss.png'}")
    if other is not None:
        print(f"compared  {comparison(record, other)}")


# ---- command line


def existing(name: str) -> Path:
    """Returns the path of a file that exists."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {name}")
    return path


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "--out", type=Path, default=Path("runs/bytes-lm"), help="folder of the run (default: %(default)s)"
    )
    made.add_argument("--resume", action="store_true", help="continue the run in --out")
    made.add_argument("--text", type=existing, help="a file to train on (default: the text of this Python)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    made.add_argument("--backend", help="backend that must serve the calls (default: the best one)")
    made.add_argument(
        "--compare", type=existing, metavar="RUN.JSON", help="draw the curve of another run beside this one"
    )
    made.add_argument(
        "--every", type=int, default=50, help="steps between checkpoints (default: %(default)s)"
    )
    made.add_argument(
        "--sample", type=int, default=200, help="bytes to write at the end (default: %(default)s)"
    )
    made.add_argument("--no-picture", action="store_true", help="draw no loss.png")
    for name, default in DEFAULTS._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(
            flag, type=type(default), default=default, help=f"{HELP[name]} (default: %(default)s)"
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    command = parser()
    args = command.parse_args(arguments)
    for name in (*Options._fields, "every"):
        if name != "seed" and not getattr(args, name) > 0:
            command.error(f"--{name.replace('_', '-')}: expected a number above 0, got {getattr(args, name)}")
    if not args.no_picture and importlib.util.find_spec("matplotlib") is None:
        command.error("loss.png needs matplotlib: python -m pip install matplotlib, or pass --no-picture")
    options = Options(**{name: getattr(args, name) for name in Options._fields})
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, copy = args.out / "checkpoint.pt", args.out / "text.txt"
    if args.resume and not checkpoint.exists():
        command.error(f"--resume: there is no {checkpoint}")
    if checkpoint.exists() and not args.resume:
        command.error(f"{args.out} has a checkpoint: pass --resume to continue, or another --out")
    raw = args.text.read_bytes() if args.text else copy.read_bytes() if args.resume else text_of_python()
    text = Text.of(raw)
    if len(text.validation) < options.tokens + 1:
        command.error(f"--text: expected at least {10 * options.tokens + 10} bytes, got {len(raw)}")
    run = Run(options, text, device, args.backend)
    other = None if args.compare is None else json.loads(args.compare.read_text())
    try:
        if other is not None:
            check_same(run.identity(), other["identity"], str(args.compare))
        if args.resume:
            run.load(checkpoint)
    except ValueError as error:
        command.error(str(error))
    copy.write_bytes(raw)

    print(f"text      {len(raw):,} bytes, the last {VALIDATION:.0%} for validation")
    print(f"model     {sum(p.numel() for p in run.model.parameters()):,} parameters on {device}")
    try:
        run.train(checkpoint, args.every, progress)
    except KeyboardInterrupt:
        print(f"\nstopped at step {len(run.losses)}; --resume continues from the last checkpoint")
        return 130
    except KdaError as error:  # such as a GPU without a backend
        print(f"\n{error}", file=sys.stderr)
        return 1
    finish(run, other, args.out, picture=not args.no_picture)
    if args.sample > 0:
        written = sample(run.model, PROMPT, args.sample, options.seed)
        print(f"sample    {(PROMPT + written).decode(errors='replace')!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
