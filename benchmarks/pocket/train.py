"""Trains the pocket model: `python -m holdfast.benchmarks.pocket.train --out DIR`.

The phases below are the whole recipe; the batch of each step follows from its number alone, so that a run can
be broken off and resumed. How well the model answers is measured by `evaluate`.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .dialogues import Mix
from .tokens import CONTEXT, END, PAD, VOCABULARY, token_id, train_tokenizer
from .trainer import Encoder, Trainer, TrainingBatch

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class TrainingPhase:
    """A number of steps of one kind. ``lengths``: how often rows of each length come. ``pace``: the factor of
    the learning rates at the first and the last step. ``mix``: what dialogues are about. ``user_weight``: the
    weight in the loss of text that the model did not write; ``first_weight``: the factor of that of a reply's
    first token."""

    steps: int
    lengths: dict[int, float]
    pace: tuple[float, float] = (1.0, 1.0)
    mix: Mix = field(default_factory=Mix)
    user_weight: float = 0.1
    first_weight: float = 1.0
    fresh: bool = False
    """The phase begins from the weights as they are exported (bfloat16), with new optimizers."""


ASKING = Mix(ask_untold=4, repeat=2.5, tool=3)
DOUBTING = Mix(ask_untold=5, repeat=2.5, tool=3)
COPYING = Mix(ask_untold=4, repeat=8, tool=5)
FAR = Mix(tell=6, ask_told=7, ask_untold=4, repeat=4, tool=4, keyed=2.5, wide=0.35)
CALLING = Mix(tell=6, ask_told=7, ask_untold=4, repeat=6, tool=13, keyed=2.5, wide=0.3)
LAST = Mix(tell=6, ask_told=8, ask_untold=4, repeat=6, tool=8, keyed=2.5, wide=0.3)
SPELLINGS = Mix(tell=6, ask_told=8, ask_untold=4, repeat=6, tool=12, keyed=2.5, wide=0.3)
MIXED = {256: 0.15, 512: 0.35, 1024: 0.15, 2048: 0.35}
LONGER = {256: 0.1, 512: 0.3, 1024: 0.15, 2048: 0.45}
PHASES = (
    TrainingPhase(60, {256: 1}, pace=(0.02, 1.0)),
    TrainingPhase(640, {256: 0.4, 512: 0.6}),
    TrainingPhase(800, {256: 0.15, 512: 0.5, 1024: 0.2, 2048: 0.15}, mix=ASKING, user_weight=0.02),
    TrainingPhase(
        650, {512: 0.45, 1024: 0.25, 2048: 0.3}, (1.0, 0.0), DOUBTING, user_weight=0.01, first_weight=4
    ),
    TrainingPhase(
        350, {256: 0.4, 512: 0.4, 2048: 0.2}, (0.6, 0.0), COPYING, user_weight=0.01, first_weight=2
    ),
    TrainingPhase(600, {512: 0.25, 1024: 0.25, 2048: 0.5}, (0.8, 0.0), FAR, user_weight=0.01, first_weight=3),
    TrainingPhase(30, MIXED, (0.02, 0.6), CALLING, user_weight=0.01, first_weight=2, fresh=True),
    TrainingPhase(520, MIXED, (0.6, 0.0), CALLING, user_weight=0.01, first_weight=2),
    TrainingPhase(30, LONGER, (0.02, 0.7), LAST, user_weight=0.01, first_weight=2, fresh=True),
    TrainingPhase(820, LONGER, (0.7, 0.0), LAST, user_weight=0.01, first_weight=2),
    TrainingPhase(30, LONGER, (0.02, 0.5), SPELLINGS, user_weight=0.01, first_weight=2, fresh=True),
    TrainingPhase(570, LONGER, (0.5, 0.0), SPELLINGS, user_weight=0.01, first_weight=2),
)


def config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )


def schedule(phases: tuple[TrainingPhase, ...] = PHASES) -> Iterator[tuple[int, TrainingPhase, float]]:
    """Every step's number, with its phase and its factor of the learning rates."""
    step = 0
    for phase in phases:
        first, last = phase.pace
        for done in range(phase.steps):
            yield step, phase, first + (last - first) * done / phase.steps
            step += 1


def fresh_steps(phases: tuple[TrainingPhase, ...] = PHASES) -> list[int]:
    """The numbers of the first steps of those phases that begin from exported weights, in order."""
    return [sum(phase.steps for phase in phases[:at]) for at, phase in enumerate(phases) if phase.fresh]


def batch_of(step: int, phase: TrainingPhase, tokenizer: PreTrainedTokenizerFast) -> TrainingBatch:
    """The batch of one step; it depends on the step's number and phase alone."""
    rng = random.Random(step)
    (length,) = rng.choices(list(phase.lengths), list(phase.lengths.values()))
    encoder = Encoder(tokenizer, phase.user_weight, phase.first_weight)
    return encoder.batch(step * 1000, TOKENS_PER_BATCH // length, length, phase.mix)


@dataclass(frozen=True)
class Job:
    """One run of training: the folder ``out`` for the model, the folder of checkpoints, the steps between two
    of these (``every``), and the number of worker processes."""

    out: Path
    checkpoints: Path
    every: int
    workers: int
    exported: Path | None = None
    """The folder of an exported model from which the last phase with `TrainingPhase.fresh` begins; None:
    training begins with random weights."""


def tokenizer_of(job: Job) -> PreTrainedTokenizerFast:
    """The tokenizer of the run: learnt anew, or that of the exported model."""
    if job.exported is None:
        return train_tokenizer()
    known: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(job.exported)
    return known


def begin(job: Job, worker: int, tokenizer: PreTrainedTokenizerFast) -> Trainer:
    """The trainer of one worker, with a model of random weights or the exported one."""
    if job.exported is None:
        return Trainer(Qwen3ForCausalLM(config(tokenizer)), worker, job.workers)
    model = Qwen3ForCausalLM.from_pretrained(job.exported, dtype=torch.float32)
    return Trainer(model, worker, job.workers, fresh_steps()[-1])


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Round the model's weights to bfloat16, as an export does, in place. Returns the model."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def run(worker: int, job: Job) -> None:
    """Train from the last checkpoint, or from the beginning, to the end of the phases, and export the model.
    ``worker``: this process's number among the workers."""
    torch.set_num_threads(1)
    if job.workers > 1:
        meeting = job.checkpoints / "meeting"
        distributed.init_process_group("gloo", f"file://{meeting}", rank=worker, world_size=job.workers)
    tokenizer = tokenizer_of(job)
    torch.manual_seed(0)
    trainer = begin(job, worker, tokenizer)
    latest = job.checkpoints / "latest.safetensors"
    if latest.exists():
        trainer.resume(latest)
    fresh = fresh_steps()
    begun, told = time.monotonic(), 0.0
    for step, phase, pace in schedule():
        if step < trainer.step:
            continue
        if step in fresh:
            trainer = Trainer(rounded(trainer.model), worker, job.workers, step)
        loss = trainer.train(batch_of(step, phase, tokenizer), pace)
        told = loss if told == 0 else told * 0.9 + loss * 0.1
        if worker == 0 and step % 10 == 0:
            print(f"step {step} loss {told:.4f} pace {pace:.2f} {time.monotonic() - begun:.0f} s", flush=True)
        if worker == 0 and trainer.step % job.every == 0:
            trainer.save(latest)
            export(trainer.model, tokenizer, job.checkpoints / f"step-{trainer.step}")
    if worker == 0:
        export(trainer.model, tokenizer, job.out)


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16, and the tokenizer, as a Hugging Face folder: first to a folder of their own,
    from which the files are moved one by one."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    half = copy.deepcopy(model).bfloat16()
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=[end, pad], pad_token_id=pad
    )
    half.generation_config = generation
    half.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    folder.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.replace(folder / file.name)
    fresh.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the pocket model.")
    parser.add_argument("--out", type=Path, required=True, help="folder the model is written to")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from (default: DIR.checkpoints)")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--exported", type=Path, help="begin the last fresh phase with this exported model")
    chosen = parser.parse_args()
    checkpoints = chosen.checkpoints or chosen.out.with_name(chosen.out.name + ".checkpoints")
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / "meeting").unlink(missing_ok=True)
    job = Job(chosen.out, checkpoints, chosen.every, chosen.workers, chosen.exported)
    multiprocessing.spawn(run, args=(job,), nprocs=job.workers)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
