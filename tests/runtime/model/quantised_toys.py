"""Writes quantised checkpoints of toys, each kind as its public description says, and the model that it means.

Nothing here is the reader's: codes are put into words one at a time. Beside a folder of quantised tensors
stands the same model in float32, whose linears have exactly the numbers that the codes stand for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from holdfast.runtime.model.checkpoint import SINGLE

Tensors = dict[str, torch.Tensor]
LINEAR = re.compile(r"layers\.\d+\..*_proj\.weight$")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Toy:
    """A quantised checkpoint, and the float32 model that it means. ``activations``: what products take for
    their inputs, by linear."""

    folder: Path
    plain: Path
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)


@dataclass
class Kind:
    """A kind of checkpoint. ``write``: makes a linear's tensors, by suffix, and the numbers that they mean, of
    its name and float weight. ``config``: the ``quantization_config``. ``inputs``: what its products take for
    their inputs. ``words``: what an operator is told."""

    config: dict[str, Any]
    write: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]
    words: str
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    only: str = ""


def make(source: Path, folder: Path, kind: Kind, dtype: torch.dtype = torch.float32) -> Toy:
    """Quantise the linears of a toy whose names match ``kind.only``. ``dtype``: of what is not quantised."""
    tensors = load_file(source / SINGLE)
    stored: Tensors = {}
    plain: Tensors = {}
    activations = {}
    for name, tensor in tensors.items():
        if LINEAR.search(name) and re.search(kind.only, name):
            module = name.removesuffix(".weight")
            made, numbers = kind.write(module, tensor.float().numpy())
            stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in made.items()}
            plain[name] = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
            if kind.inputs is not None:
                activations[module] = kind.inputs
        else:
            stored[name] = tensor.to(dtype)
            plain[name] = tensor.to(dtype).float()
    for place, what in ((folder / "quantised", stored), (folder / "plain", plain)):
        shutil.copytree(source, place)
        save_file(what, place / SINGLE)
    edit(folder / "quantised", quantization_config=kind.config, dtype=str(dtype).removeprefix("torch."))
    edit(folder / "plain", dtype="float32")
    return Toy(folder / "quantised", folder / "plain", activations)


def edit(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# --- quantising, and putting codes into words -----------------------------------------------------------------


def integers(
    weight: np.ndarray, bits: int, group: int, *, zeros: bool, kind: str = "float16"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes ``[rows, width]``, zeros and scales ``[rows, groups]``; the scales are rounded to
    ``kind``."""
    rows, width = weight.shape
    groups = weight.reshape(rows, -1, group or width)
    top = (1 << bits) - 1
    if zeros:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = _rounded((high - low) / top + 1e-6, kind)
        zero = np.clip(np.round(-low / scales), 1, top)
    else:
        scales = _rounded(np.abs(groups).max(-1) / (top // 2) + 1e-6, kind)
        zero = np.full(scales.shape, float(1 << bits - 1))
    codes = np.clip(np.round(groups / scales[..., None] + zero[..., None]), 0, top)
    return codes.reshape(rows, width).astype(np.int64), zero.astype(np.int64), scales


def _rounded(scales: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(scales).to(getattr(torch, kind)).float().numpy()


def meant(codes: np.ndarray, zero: np.ndarray, scales: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The numbers of codes; ``which``: the group of each column."""
    return (codes - zero[:, which]) * scales[:, which]


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes ``[lines, n]`` in int32, the first in the lowest bits; the last word may not be full."""
    many = 32 // bits
    found = np.zeros((codes.shape[0], -(-codes.shape[1] // many)), np.int64)
    for at in range(codes.shape[1]):
        found[:, at // many] |= codes[:, at] << bits * (at % many)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32).copy())


# --- compressed-tensors ---------------------------------------------------------------------------------------


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The ``quantization_config`` as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, "observer": "minmax", **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "version": "0.9.0",
    }


def pack_quantized(bits: int, group: int, *, zeros: bool = False, order: bool = False) -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows, width = weight.shape
        which = np.arange(width) // (group or width)
        shuffled = np.random.default_rng(len(module)).permutation(width) if order else np.arange(width)
        codes, zero, scales = integers(weight[:, shuffled], bits, group, zeros=zeros, kind="bfloat16")
        back = np.argsort(shuffled)
        codes, which = codes[:, back], which[back]
        made = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, width]),
        }
        if zeros:
            made["weight_zero_point"] = words(zero.T, bits).T
        if order:
            made["weight_g_idx"] = torch.from_numpy(which.astype(np.int32))
        return made, meant(codes, zero, scales, which)

    scales = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    told = {"num_bits": bits, "type": "int", "symmetric": not zeros, **scales}
    if order:
        told["actorder"] = "group"
    name = (
        f"int{bits}" + (f" in groups of {group}" if group else " by row") + (" with zeros" if zeros else "")
    )
    return Kind(compressed("pack-quantized", told), write, name)


def per_token_int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x.float() / scale).round() * scale, 0.0)


def per_token_fp8(x: torch.Tensor) -> torch.Tensor:
    return fp8_of(x, x.float().abs().amax(-1, keepdim=True) / 448)


def per_group_fp8(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([per_token_fp8(one) for one in x.split(128, -1)], -1)


def fp8_of(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKEN_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def w8a8(form: str = "int-quantized") -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, zero, scales = integers(weight, 8, 0, zeros=False, kind="bfloat16")
        made = {
            "weight": torch.from_numpy(codes - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
        }
        return made, meant(codes, zero, scales, np.zeros(weight.shape[1], int))

    told = {"num_bits": 8, "type": "int", "strategy": "channel"}
    name = "int8 by row, activations int8 by token"
    return Kind(compressed(form, told, TOKEN_INT8), write, name, per_token_int8)


def _fp8_codes(weight: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Codes of a matrix, and the numbers that they mean; ``scales`` fit its shape."""
    codes = torch.from_numpy(weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float().numpy() * scales


def float_quantized(strategy: str = "channel", *, static: bool = False) -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        axis = 1 if strategy == "channel" else None
        scales = np.abs(weight).max(axis, keepdims=True).astype(np.float32) / 448
        codes, numbers = _fp8_codes(weight, scales)
        stored = scales if strategy == "channel" else scales.reshape(1)
        made = {"weight": codes, "weight_scale": torch.from_numpy(stored.copy())}
        if static:
            made["input_scale"] = torch.tensor([STATIC])
        return made, numbers

    inputs = {**TOKEN_FP8, "strategy": "tensor", "dynamic": False} if static else TOKEN_FP8
    told = {"num_bits": 8, "type": "float", "strategy": strategy}
    return Kind(
        compressed("float-quantized", told, inputs),
        write,
        "fp8 by row, activations fp8 " + ("of a fixed scale" if static else "by token"),
        (lambda x: fp8_of(x, STATIC)) if static else per_token_fp8,
    )


STATIC = 0.0625
"""The scale of activations where a checkpoint has one."""


def mxfp4_codes(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[rows, width]``, exponents ``[rows, width / 32]``, and the numbers that they mean."""
    rows, width = weight.shape
    groups = weight.reshape(rows, -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1) + 1e-9)).astype(int) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(scaled[..., None] - np.array(E2M1)).argmin(-1)
    numbers = np.array(E2M1)[codes] * 2.0 ** exponents[..., None]
    return codes.reshape(rows, width), exponents + 127, numbers.reshape(rows, width)


def mxfp4(*, blocks: bool = False) -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, exponents, numbers = mxfp4_codes(weight)
        halves = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        scales = torch.from_numpy(exponents).to(torch.uint8)
        if blocks:
            return {"weight_blocks": halves.view(len(codes), -1, 16), "weight_scales": scales}, numbers
        return {"weight_packed": halves, "weight_scale": scales}, numbers

    told = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return Kind(
        config if blocks else compressed("mxfp4-pack-quantized", told), write, "mxfp4 in groups of 32"
    )


def two_groups() -> Kind:
    """Attention in int8 with rounded activations, all else in int4: by a pattern, a name, and the class."""
    one, other = w8a8(), pack_quantized(4, 32)

    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        return (one if "self_attn" in module else other).write(module, weight)

    rest = {**other.config["config_groups"]["group_0"], "format": "pack-quantized"}
    attention = {**one.config["config_groups"]["group_0"], "format": "int-quantized"}
    attention["targets"] = ["model.layers.1.self_attn.o_proj", "re:.*self_attn.[qkv]_proj$"]
    first = {**attention, "targets": ["re:model.layers.0.self_attn.o_proj"]}
    config = compressed("mixed-precision", {})
    config["config_groups"] = {"group_0": rest, "group_1": attention, "group_2": first}
    return Kind(config, write, "")


# --- GPTQ, AWQ, block FP8 -------------------------------------------------------------------------------------


def gptq(
    bits: int, group: int, *, sym: bool = True, order: bool = False, v2: bool = False, g_idx: bool = True
) -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        width = weight.shape[1]
        which = np.arange(width) // (group if group > 0 else width)
        shuffled = np.random.default_rng(len(module)).permutation(width) if order else np.arange(width)
        codes, zero, scales = integers(weight[:, shuffled], bits, max(group, 0), zeros=not sym)
        back = np.argsort(shuffled)
        codes, which = codes[:, back], which[back]
        made = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zero.T - (0 if v2 else 1), bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        if g_idx:
            made["g_idx"] = torch.from_numpy(which.astype(np.int32))
        return made, meant(codes, zero, scales, which)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    name = f"int{bits}" + (f" in groups of {group}" if group > 0 else " by row")
    return Kind(config, write, name + ("" if sym else " with zeros"))


def awq(group: int) -> Kind:
    def put(codes: np.ndarray) -> torch.Tensor:
        """Codes ``[lines, n]``, 8 neighbours in a word: code AWQ_ORDER[i] at bit 4 i."""
        found = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
        for word in range(found.shape[1]):
            for i in range(8):
                found[:, word] |= codes[:, word * 8 + AWQ_ORDER[i]] << 4 * i
        return torch.from_numpy(found.astype(np.uint32).view(np.int32).copy())

    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, zero, scales = integers(weight, 4, group, zeros=True)
        made = {
            "qweight": put(codes.T),
            "qzeros": put(zero.T),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        return made, meant(codes, zero, scales, np.arange(weight.shape[1]) // group)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Kind(config, write, f"int4 in groups of {group} with zeros")


def block_fp8() -> Kind:
    def write(module: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows, width = weight.shape
        scales = np.zeros((-(-rows // 128), -(-width // 128)), np.float32)
        whole = np.zeros((rows, width), np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scales[i, j] = np.abs(weight[block]).max() / 448
                whole[block] = scales[i, j]
        codes, numbers = _fp8_codes(weight, whole)
        return {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}, numbers

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return Kind(config, write, "fp8 in groups of 128, activations fp8 in groups of 128", per_group_fp8)
