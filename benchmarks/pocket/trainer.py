"""One training step of the pocket model, its batches, its checkpoints, and several workers that share a batch.

What is trained in which order is decided in `train`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .dialogues import Mix, dialogue
from .script import Dialogue, Segment, head, segments


@dataclass(frozen=True)
class TrainingBatch:
    """Input token ids, the ids that follow each of them, and the weights of these in the loss, each `[rows,
    length]`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def share(self, worker: int, workers: int) -> TrainingBatch:
        """The rows of one worker: every ``workers``-th row, from the row ``worker`` on."""
        rows = slice(worker, None, workers)
        return TrainingBatch(self.inputs[rows], self.targets[rows], self.weights[rows])


@dataclass(frozen=True)
class Encoder:
    """Encodes dialogues of the training split as token ids and weights in the loss.

    `user_weight` is the weight of all text that the model did not write; `first_weight` multiplies the weight
    of the first token of a reply, which decides whether the model says that it was told something or not.
    """

    tokenizer: PreTrainedTokenizerFast
    user_weight: float = 0.1
    first_weight: float = 1.0

    def batch(self, seed: int, rows: int, length: int, mix: Mix) -> TrainingBatch:
        """A batch of so many rows of one length, from the dialogues of the seeds `seed`, `seed + 1`, …"""
        encoded = [self.row(dialogue(seed + row, length, mix), length + 1) for row in range(rows)]
        ids = torch.tensor([ids for ids, _ in encoded])
        weights = torch.tensor([weights for _, weights in encoded])
        return TrainingBatch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def row(self, made: Dialogue, length: int) -> tuple[list[int], list[float]]:
        """The ids and weights of a dialogue's first exchanges, as many as fit, padded to the length."""
        ids: list[int] = []
        weights: list[float] = []
        lead = head(made)
        groups = ([[lead]] if lead is not None else []) + [
            list(segments(exchange)) for exchange in made.exchanges
        ]
        for group in groups:
            more_ids, more_weights = self._encode(group)
            if len(ids) + len(more_ids) > length:
                break
            ids += more_ids
            weights += more_weights
        padding = length - len(ids)
        return ids + [self._pad] * padding, weights + [0.0] * padding

    def _encode(self, group: list[Segment]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for segment in group:
            piece = self.tokenizer.encode(segment.text, add_special_tokens=False)
            ids += piece
            weight = self.user_weight if segment.weight is None else segment.weight
            first = weight if segment.weight is None else weight * self.first_weight
            weights += [first] + [weight] * (len(piece) - 1)
        return ids, weights

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return pad


COMPILED = 512
"""The longest rows that are trained with the compiled loss; longer ones are faster without it."""


def said(weights: torch.Tensor) -> torch.Tensor:
    """For each target 1.0 if the model wrote it, else 0.0, found by its weight: what the user wrote weighs less
    than anything of the model's."""
    return (weights > 0.15).float()


@dataclass
class Trainer:
    """The model, its optimizers and the number of the next step, in one of several workers, each of which
    trains with its rows of a batch.

    The workers are processes of one thread: they meet once a step, whereas threads meet at every operation and
    wait for each other on a busy machine.
    """

    model: Qwen3ForCausalLM
    worker: int = 0
    workers: int = 1
    step: int = 0

    def __post_init__(self) -> None:
        inner = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers: dict[torch.optim.Optimizer, float] = {
            torch.optim.Muon(inner, lr=4e-3, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"): 4e-3,
            torch.optim.AdamW(outer, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0): 2e-3,
        }
        self._compiled = torch.compile(self._loss, dynamic=False)

    def train(self, batch: TrainingBatch, pace: float) -> float:
        """Train one step. ``pace`` multiplies the learning rates. Returns the loss on what the model wrote in
        this worker's rows."""
        loss_of = self._compiled if batch.inputs.shape[1] <= COMPILED else self._loss
        share = batch.share(self.worker, self.workers)
        loss, told = loss_of(share.inputs, share.targets, share.weights)
        (loss / batch.weights.sum()).backward()  # type: ignore[no-untyped-call]
        self._share_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * pace
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(told / said(share.weights).sum())

    def save(self, path: Path) -> None:
        """Write a checkpoint from which training can be resumed: the weights and the optimizers' state."""
        tensors = {f"model/{name}": weight.detach() for name, weight in self.model.named_parameters()}
        for which, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{which}/{number}/{key}": value for key, value in state.items()}
        fresh = path.with_suffix(".new")
        save_file(tensors, fresh, metadata={"step": str(self.step)})
        fresh.replace(path)

    def resume(self, path: Path) -> None:
        with safe_open(path, framework="pt") as saved, torch.no_grad():
            self.step = int(saved.metadata()["step"])
            for name, weight in self.model.named_parameters():
                weight.copy_(saved.get_tensor(f"model/{name}"))
            states: dict[str, dict[int, dict[str, torch.Tensor]]] = {"0": {}, "1": {}}
            for entry in saved.keys():  # noqa: SIM118 (it is no dict)
                which, rest = entry.split("/", 1)
                if which in states:
                    number, key = rest.split("/")
                    states[which].setdefault(int(number), {})[key] = saved.get_tensor(entry)
        for optimizer, state in zip(self.optimizers, states.values(), strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _loss(
        self, inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(input_ids=inputs, use_cache=False).logits
        losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        flat = weights.flatten()
        return (losses * flat).sum(), (losses.detach() * said(flat)).sum()

    def _share_gradients(self) -> None:
        """Sums the gradients of all workers."""
        if self.workers > 1:
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            distributed.all_reduce(flat)
            begin = 0
            for gradient in gradients:
                gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
                begin += gradient.numel()
