"""Dialogues as rows of token ids with the weight of each token in the loss.

One dialogue is one row, from position 0, so that attention never crosses into another; rows are filled with
whole exchanges and padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from .dialogues import Mix, dialogue
from .script import Dialogue, Segment, head, segments


@dataclass(frozen=True)
class Batch:
    """Inputs, their successors and the weights of these, each `[rows, length]`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def share(self, worker: int, workers: int) -> Batch:
        """The rows of one worker: every so many."""
        rows = slice(worker, None, workers)
        return Batch(self.inputs[rows], self.targets[rows], self.weights[rows])


@dataclass(frozen=True)
class Encoder:
    """Encodes dialogues of the training split.

    `user_weight` is the weight of all the model did not say; `first_weight` multiplies that of the first
    token of a reply, with which telling parts from not having been told.
    """

    tokenizer: PreTrainedTokenizerFast
    user_weight: float = 0.1
    first_weight: float = 1.0

    def batch(self, seed: int, rows: int, length: int, mix: Mix) -> Batch:
        """So many rows of one length, from the dialogues `seed`, `seed + 1`, …"""
        encoded = [self.row(dialogue(seed + row, length, mix), length + 1) for row in range(rows)]
        ids = torch.tensor([ids for ids, _ in encoded])
        weights = torch.tensor([weights for _, weights in encoded])
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def row(self, made: Dialogue, length: int) -> tuple[list[int], list[float]]:
        """Ids and weights of a dialogue's first exchanges, as many as fit, padded to the length."""
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
