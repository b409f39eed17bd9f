"""Trains one variant of the tiny MoE language model and saves a PyTorch state dict.

    python train.py swiglu --out swiglu.pt
"""

import argparse
import json
import math
import time

import numpy as np
import torch
import torch.nn.functional as F

import text
from model import CONFIGS, TinyMoe

BATCH = 16
PEAK_LR = 4e-3
WARMUP = 100
BALANCE_WEIGHT = 0.01
SEED = 2026


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    return PEAK_LR * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))))


@torch.no_grad()
def bits_per_byte(model: TinyMoe, data: bytes, limit: int | None = None) -> float:
    """Held-out cost in windows of the model's context; the first byte of each is not predicted."""
    length = model.config.context + 1
    ids = torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64))
    windows = ids[: ids.numel() // length * length].view(-1, length)[:limit]
    model.eval()
    nats = 0.0
    for batch in windows.split(32):
        logits = model(batch[:, :-1])
        nats += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return nats / (windows.shape[0] * (length - 1)) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("variant", choices=CONFIGS)
    parser.add_argument("--out", required=True, help="state dict to write")
    parser.add_argument("--text", help="jargon.dict.dz, if not installed and not to be downloaded")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--threads", type=int, default=1, help="sums depend on it: 1 to reproduce")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    train_text, held_out = text.load(args.text)
    data = torch.from_numpy(np.frombuffer(train_text, np.uint8).astype(np.int64))
    config = CONFIGS[args.variant]
    model = TinyMoe(config)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
    )

    window = torch.arange(config.context + 1)
    started = time.monotonic()
    for step in range(args.steps):
        starts = torch.randint(data.numel() - config.context, (BATCH,))
        ids = data[starts[:, None] + window]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        balance = torch.stack([block.moe.balance_loss for block in model.blocks]).mean()
        optimizer.zero_grad()
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        optimizer.step()
        if (step + 1) % 100 == 0 or step == 0:
            record = {
                "step": step + 1,
                "train_bits_per_byte": round(loss.item() / math.log(2), 4),
                "held_out_bits_per_byte": round(bits_per_byte(model, held_out, 64), 4),
                "balance": round(balance.item(), 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            print(json.dumps(record), flush=True)
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
