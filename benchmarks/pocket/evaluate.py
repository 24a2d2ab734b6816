"""Measures the pocket model's skills with transformers alone: `python -m holdfast.benchmarks.pocket.evaluate
DIR --count N`.

Usually takes one pass over a conversation with its expected replies: greedy decoding gives a reply exactly if
each of its tokens is the most likely one. With `--live` each reply is generated, and becomes the history.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from .script import head, segments
from .skills import SKILLS, ScoredConversation, ScoredTurn, conversations


@dataclass(frozen=True)
class Miss:
    """A scored reply that was not the expected one: what the user said, the expected reply, and what came."""

    user: str
    expected: str
    got: str


@dataclass(frozen=True)
class Judge:
    """Judges replies of the model, which is in fp32."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @torch.inference_mode()
    def forced(self, conversation: ScoredConversation) -> Iterator[Miss]:
        """The scored replies that greedy decoding would not give: those with a token that is not the most
        likely one after the expected history."""
        ids: list[int] = []
        spans: list[tuple[ScoredTurn, int, int]] = []
        dialogue = conversation.dialogue()
        if (lead := head(dialogue)) is not None:
            ids += self._encode(lead.text)
        for turn, exchange in zip(conversation.turns, dialogue.exchanges, strict=True):
            for segment in segments(exchange):
                piece = self._encode(segment.text)
                if turn.scored and segment.weight is not None:
                    spans.append((turn, len(ids), len(ids) + len(piece)))
                ids += piece
        likely = self.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        for turn, begin, end in spans:
            if likely[begin - 1 : end - 1] != ids[begin:end]:
                yield Miss(turn.user, self._decode(ids[begin:end]), self._decode(likely[begin - 1 : end - 1]))

    def live(self, conversation: ScoredConversation) -> Iterator[Miss]:
        """The scored replies that were wrong when the whole conversation was generated."""
        lead = head(conversation.dialogue())
        cache, waiting = DynamicCache(config=self.model.config), self._encode(lead.text) if lead else []
        for turn, exchange in zip(conversation.turns, conversation.dialogue().exchanges, strict=True):
            for segment in segments(exchange):
                if segment.weight is None:
                    waiting += self._encode(segment.text)
                    continue
                said = self._generate(cache, waiting)
                waiting = said[-1:]
                if turn.scored and self._decode(said) != segment.text:
                    yield Miss(turn.user, segment.text, self._decode(said))

    @torch.inference_mode()
    def _generate(self, cache: DynamicCache, fresh: list[int], limit: int = 400) -> list[int]:
        """Generate greedily up to the end mark or ``limit`` tokens. ``fresh``: ids that are not in the cache
        yet. The last generated token is not in the cache yet."""
        said: list[int] = []
        while len(said) < limit and (not said or said[-1] != self.tokenizer.eos_token_id):
            ids = torch.tensor([said[-1:] or fresh])
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            said.append(int(logits[0, -1].argmax()))
        return said

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def load(folder: Path) -> Judge:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    return Judge(model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the pocket model's skills.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200, help="conversations of each skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skills", nargs="*", default=SKILLS, choices=SKILLS)
    parser.add_argument("--live", action="store_true", help="really generate every reply")
    parser.add_argument("--misses", action="store_true", help="print the wrong replies")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    judge = load(chosen.model)
    hold = judge.live if chosen.live else judge.forced
    for skill in chosen.skills:
        right = 0
        for conversation in conversations(skill, chosen.count, chosen.seed):
            misses = list(hold(conversation))
            right += not misses
            for miss in misses if chosen.misses else ():
                print(asdict(miss))
        print(f"{skill:14} {right / chosen.count:7.1%} of {chosen.count}", flush=True)


if __name__ == "__main__":
    main()
