"""Log probabilities of what was drawn and of what was likeliest, as a model gave them: before any edit.

The reference in plain torch. Knows no sequences: a row is logits and an id.
"""

from __future__ import annotations

from torch import Tensor


def log_probabilities(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log probability of ``ids`` ``[rows]``, and ids and log probabilities of the ``most`` likeliest.

    ``logits``: fp32 ``[rows, vocab]``. Fp64 ``[rows]``; int64 and fp64 ``[rows, most]``, the likeliest first.
    """
    whole = logits.double().logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, ids[:, None]).double() - whole
    best = logits.topk(most, dim=-1)
    return chosen.squeeze(-1), best.indices, best.values.double() - whole
