"""Bitwise comparison of results before and after a change: hashes of losses, gradients and generated tokens.

Use it for changes that must not alter results, such as moved files and new names. Record before, compare after:

    python benchmarks/bitwise.py record before.json
    python benchmarks/bitwise.py compare before.json      # one line per difference, and exit status 1

`--only TEXT` runs the settings whose name contains the text. Every setting is a tiny model with fixed random weights.
Hashes depend on the processor and on the PyTorch version, because processors round differently. Do not commit them.
After a rename in trunkline, adapt `streamed` and the functions below it; the table of settings has its own names.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["MKL_CBWR"] = "COMPATIBLE"  # otherwise matrix products depend on the addresses of the tensors
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("tests", "benchmarks")]

import torch  # noqa: E402
from _ranks import Job  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from support_matrix import ROWS  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import trunkline  # noqa: E402
from trunkline.evaluate import StreamedScorer  # noqa: E402

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
Parts = dict[str, Tensor]


def documents(ids_BS: Tensor) -> Parts:
    """Return document ids for three documents in each row."""
    ends = torch.tensor([0.3, 0.35]) * ids_BS.shape[1]
    return {"document_ids": (torch.arange(ids_BS.shape[1]) >= ends[:, None]).sum(0)[None].expand_as(ids_BS)}


def positions(ids_BS: Tensor) -> Parts:
    """Return position ids that begin anew at each document; every row has other boundaries."""
    cuts = [[0, 9 + 11 * row, 50 + row, ids_BS.shape[1]] for row in range(len(ids_BS))]
    return {"position_ids": torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in cuts])}


def padding(ids_BS: Tensor) -> Parts:
    """Return an attention mask with padding on the right, of another length in each row."""
    lengths = ids_BS.shape[1] - 1 - 23 * torch.arange(len(ids_BS))
    return {"attention_mask": (torch.arange(ids_BS.shape[1]) < lengths[:, None]).long()}


def counted(ids_BS: Tensor) -> Parts:
    """Return a num_items_in_batch that differs from the number of tokens."""
    return {"num_items_in_batch": torch.tensor(71)}


def adapters(model: nn.Module) -> nn.Module:
    """Add LoRA adapters to every linear layer."""
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def frozen(model: nn.Module) -> nn.Module:
    """Freeze the embeddings."""
    model.get_input_embeddings().requires_grad_(False)
    return model


@dataclass(frozen=True)
class Setting:
    """Model, settings of `stream`, and the computation to run.

    Attributes:
        name: name of the setting.
        family: name of the config class in transformers, without "Config".
        do: `train`, `score`, or one that uses a cache: `generate`, `sample`, `beams`, or `load`, which generates with
            a saved and loaded cache.
        dtype: dtype of the model.
        rows: rows of the batch.
        length: tokens per row.
        new: tokens to generate.
        config: additional fields of the model's config.
        change: function that changes the model before it is streamed.
        given: function that returns more arguments of the forward, from the tokens.
        scale: factor of the loss.
        autocast: run the forward in bf16 autocast.
        mesh: degrees of parallelism, on two ranks.
        zero: ZeRO stage of `shard`; None does not shard.
        chunk: `chunk_size`.
        keep: key of `KEEP`.
        every: `checkpoint_every`.
        kernel: `attn_kernel`.
        head: `logits_budget`.
        strategy: `attn_strategy`.
        prefetch: `prefetch`.
        device: `device_budget`; chunks over it go to the host.
        host: `host_budget`; chunks over it go to disk.
    """

    name: str
    family: str
    do: str = "train"
    dtype: torch.dtype = FP32
    rows: int = 1
    length: int = 96
    new: int = 24
    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    given: Callable[[Tensor], Parts] = lambda ids_BS: {}
    scale: float = 1.0
    autocast: bool = False
    mesh: dict[str, int] = field(default_factory=dict)
    zero: int | None = None
    chunk: int = 16
    keep: str | None = None
    every: int | None = None
    kernel: str | None = None
    head: int | None = None
    strategy: str | None = None
    prefetch: int | None = None
    device: int | None = None
    host: int | None = None


SETTINGS = [
    Setting("llama", "Llama"),
    Setting("llama, fp64, two rows, chunks that do not divide", "Llama", dtype=FP64, rows=2, length=101, chunk=13),
    Setting("llama, bf16, keys kept", "Llama", dtype=BF16, rows=2, keep="kv", length=128),
    Setting("mistral, window", "Mistral", rows=2, length=77),
    Setting("gemma2", "Gemma2", length=90),
    Setting("gemma3, bf16, both kept", "Gemma3Text", dtype=BF16, keep="both", length=120, chunk=32),
    Setting("gpt2, dropout", "GPT2", rows=2, config={"resid_pdrop": 0.3, "embd_pdrop": 0.1}),
    Setting("gpt2, dropout, nothing kept, every 2nd input", "GPT2", config={"resid_pdrop": 0.3}, keep="none", every=2),
    Setting("qwen3 with experts", "Qwen3Moe", length=80),
    Setting("mixtral, every 2nd input, keys kept", "Mixtral", keep="kv", every=2, chunk=11),
    Setting("gpt-oss, sinks, both kept", "GptOss", keep="both", rows=2, length=70),
    Setting("deepseek-v3", "DeepseekV3", chunk=24),
    Setting("llama4", "Llama4Text", length=75),
    Setting("phi3, bf16, math kernel", "Phi3", dtype=BF16, kernel="math", rows=2),
    Setting("olmo2, nothing kept", "Olmo2", keep="none", length=100),
    Setting("granite, fp64, number of items, scaled loss", "Granite", dtype=FP64, given=counted, scale=-3.7),
    Setting("glm4, every 3rd input", "Glm4", every=3, chunk=20, length=103),
    Setting("documents by number, one chunk", "Llama", given=documents, chunk=200, length=110),
    Setting("documents by position, two rows, window", "Mistral", dtype=FP64, given=positions, rows=2),
    Setting("padding on the right, keys kept", "Qwen2", given=padding, rows=3, keep="kv"),
    Setting("lora, bf16", "Llama", dtype=BF16, change=adapters, rows=2),
    Setting("frozen embeddings, autocast", "Llama", change=frozen, autocast=True, keep="none"),
    Setting("tied embeddings, small tiles of the head", "Llama", config={"tie_word_embeddings": True}, head=4_000),
    Setting("disk, attention resident", "Llama", strategy="resident", device=120_000, host=20_000, keep="both"),
    Setting("disk, attention by head groups", "Llama", strategy="head_groups", device=90_000, host=0, length=160),
    Setting("disk, attention streamed, no double buffer", "Llama", strategy="streamed", prefetch=1, device=90_000,
            host=10_000, keep="none", every=3, rows=2),
    Setting("disk, sinks, bf16, both kept", "GptOss", dtype=BF16, device=90_000, host=0, keep="both", rows=2),
    Setting("disk, documents, window, keys kept", "Mistral", given=documents, device=40_000, host=0, keep="kv"),
    Setting("scores, disk", "Gemma2", "score", device=40_000, host=0, rows=2),
    Setting("cache, bf16, rows with padding, beams", "Llama", "beams", rows=2, dtype=BF16, given=padding),
    Setting("cache, sampled", "GptOss", "sample", length=60),
    Setting("cache on disk, windows, until new tokens go there", "Gemma3Text", "generate", device=300_000, host=0,
            length=400, new=270),
    Setting("cache, saved and loaded", "DeepseekV3", "load", rows=2, length=77),
    Setting("cache, documents, window", "Mistral", "generate", given=positions, dtype=FP64, length=90),
    Setting("sp", "Llama", mesh={"sp": 2}, length=101, rows=2),
    Setting("sp, zero 3, disk", "Qwen3", mesh={"sp": 2}, zero=3, device=60_000, host=0, keep="none", every=2),
    Setting("cp, zero 2, window, documents", "Mistral", mesh={"cp": 2}, zero=2, given=documents, dtype=FP64),
    Setting("dp, zero 3, bf16", "Llama", mesh={"dp": 2}, zero=3, dtype=BF16, keep="both"),
    Setting("tp", "Llama", mesh={"tp": 2}, zero=0),
    Setting("cp, cache", "Llama", "generate", mesh={"cp": 2}, rows=2),
]  # fmt: skip
KEEP = {None: None, "none": (), "kv": ("kv",), "both": ("attention", "kv")}


def streamed(setting: Setting, model: nn.Module, mesh: Any, folder: str) -> nn.Module:
    """Shard and stream the model as the setting says."""
    given = {
        "chunk_size": setting.chunk, "keep": KEEP[setting.keep], "checkpoint_every": setting.every,
        "attn_kernel": setting.kernel, "logits_budget": setting.head, "attn_strategy": setting.strategy,
        "prefetch": setting.prefetch, "device_budget": setting.device, "host_budget": setting.host,
        "offload_dir": None if setting.host is None else folder, "mesh": mesh,
    }  # fmt: skip
    if setting.zero is not None:
        trunkline.shard(model, mesh, zero=setting.zero)
    return trunkline.stream(model, **{name: value for name, value in given.items() if value is not None})


def scored(model: nn.Module, ids_BS: Tensor) -> Parts:
    """Score every token."""
    found = StreamedScorer(model)(ids_BS)
    return {"log_probs": found.log_probs, "is_greedy": found.is_greedy}


def generated(setting: Setting, model: nn.Module, ids_BS: Tensor, folder: str) -> Parts:
    """Prefill two prompts, generate after them, and return tokens and logits."""
    cache = trunkline.prefill(model, ids_BS, **setting.given(ids_BS))
    prompt = cache.logits
    trunkline.prefill(model, ids_BS[:, :5], cache=cache)
    if setting.do == "load":
        trunkline.save_cache(model, cache, f"{folder}/cache")
        cache = trunkline.load_cache(model, f"{folder}/cache")
    how = {"do_sample": setting.do == "sample", "num_beams": 3 if setting.do == "beams" else 1,
           "max_new_tokens": setting.new, "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
    found = trunkline.generate(
        model, ids_BS[:, 5:8], cache=cache, output_logits=True, return_dict_in_generate=True, **how
    )
    return {"prompt": prompt, "tokens": found.sequences, "logits": torch.stack(found.logits)}


def trained(setting: Setting, model: nn.Module, ids_BS: Tensor) -> Parts:
    """Train on two batches, and return their losses, the summed gradients, and logits in evaluation mode."""
    found: Parts = {}
    for number, ids in enumerate((ids_BS, ids_BS[:, :-9])):
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            loss = model(input_ids=ids, labels=ids, **setting.given(ids)).loss
        (setting.scale * loss).backward()
        found[f"loss {number}"] = loss
    with torch.no_grad():
        found["logits"] = model.eval()(input_ids=ids_BS, logits_to_keep=3).logits
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def computed(setting: Setting, folder: str) -> Parts:
    """Run a setting, and return the results of this rank."""
    mesh = trunkline.init_mesh(**setting.mesh) if setting.mesh else None
    (row,) = (row for row in ROWS if row.config == f"{setting.family}Config")
    row = dataclasses.replace(row, settings={**row.settings, **setting.config})
    model = setting.change(row.build(dtype=setting.dtype)).to(setting.dtype).train(setting.do == "train")
    model = streamed(setting, model, mesh, folder)
    random = torch.Generator().manual_seed(1 + (mesh["dp"].get_local_rank() if mesh is not None else 0))
    ids_BS = torch.randint(3, 97, (setting.rows, setting.length), generator=random)
    torch.manual_seed(5)
    if setting.do == "train":
        return trained(setting, model, ids_BS)
    return scored(model, ids_BS) if setting.do == "score" else generated(setting, model, ids_BS, folder)


def hashed(number: int, folder: str) -> str:
    """Return the hash of a setting's results, or its error."""
    digest = hashlib.sha256()
    try:
        for name, part in sorted(computed(SETTINGS[number], folder).items()):
            whole = (part.full_tensor() if isinstance(part, DTensor) else part).detach().contiguous()
            digest.update(f"{name} {whole.dtype} {list(whole.shape)}".encode())
            digest.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return digest.hexdigest()


def measure(only: str) -> dict[str, str]:
    """Return hashes by name of the setting."""
    found: dict[str, str] = {}
    torch.set_num_threads(1)
    job = Job(2, 1, hashed) if any(setting.mesh and only in setting.name for setting in SETTINGS) else None
    for number, setting in enumerate(SETTINGS):
        if only in setting.name:
            with tempfile.TemporaryDirectory() as folder:
                task = {"number": number, "folder": folder}
                found[setting.name] = " ".join(job.do(**task)) if setting.mesh and job else hashed(**task)
    if job:
        job.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare hashes; return 1 if a setting differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"], help="write hashes, or compare with them")
    parser.add_argument("file", type=Path, help="file of the hashes")
    parser.add_argument("--only", default="", help="run only settings whose name contains this text")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    found = measure(given.only)
    print(f"{trunkline.__file__}: {len(found)} settings in {time.perf_counter() - start:.0f} s")
    failed = {name: text for name, text in found.items() if ": " in text}
    if given.action == "record":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
    else:
        expected = json.loads(given.file.read_text())
        new = {name: "was not recorded" for name in found if name not in expected}
        failed = {name: "differs" for name in found if found[name] != expected.get(name)} | new | failed
        print(f"{len(found) - len(failed)} of {len(found)} are equal")
    for name, text in failed.items():
        print(f"{name}: {text}")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
