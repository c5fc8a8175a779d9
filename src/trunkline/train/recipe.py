"""The recipe: every setting of `trunkline train`, with its type, default and meaning.

This is the one place a setting exists. `train.settings` reads YAML files and the command line into it, `docs/train.md`
explains it. Lengths and sizes are global: of the whole sequence and the whole batch, never per device.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trunkline.config import StreamConfig
from trunkline.evaluate.evaluation_settings import DEFAULT_THRESHOLD, EvaluateSettings, even_depths, parse_length
from trunkline.train.presets import PRESETS


def _refuse_bool(value: Any) -> Any:
    # YAML reads `steps: yes` as true, and Python's true is the integer 1.
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _parts(value: Any) -> Any:
    """What a person may write for a list: one thing, or several with commas between them."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return (value,) if isinstance(value, int) else value


Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, le=1)]
Decay = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(_Section):
    """What is trained. Exactly one of `preset` and `path`."""

    preset: str | None = Field(default=None, description="architecture to train from scratch")
    path: str | None = Field(default=None, description="local Hugging Face model folder to go on from")
    dtype: Dtype = Field(default="bfloat16", description="type of the parameters: bfloat16 or float32")
    overrides: dict[str, Any] = Field(default_factory=dict, description="fields of the Hugging Face config to replace")

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_names(cls, value: Any) -> Any:
        return (
            {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}.get(value, value) if _is_text(value) else value
        )

    @field_validator("preset")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"'{value}' is no preset; there are {', '.join(PRESETS)}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            both = "both are set" if self.preset is not None else "neither is set"
            raise ValueError(
                "set exactly one of model.preset (train from scratch) and model.path (a local Hugging Face folder); "
                f"{both}"
            )
        return self


class DataSection(_Section):
    """What it is trained on."""

    files: list[str] = Field(description="text files, .jsonl files, folders, glob patterns, or the word stdlib")
    tokenizer: str | None = Field(
        None,
        description="bytes, or a local folder with a Hugging Face tokenizer; default: model.path's own, else bytes",
    )
    text_field: str = Field(default="text", description="field of a .jsonl line that holds the text")

    @field_validator("files", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class OptimizerSection(_Section):
    """AdamW, linear warm-up, cosine decay."""

    lr: Positive = Field(default=3e-4, description="highest learning rate")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="decay rates of the two averages")
    eps: Positive = Field(default=1e-8, description="added to the denominator")
    weight_decay: NonNegative = Field(
        default=0.1, description="decay of matrices; vectors (norms, biases) are never decayed"
    )
    warmup_steps: Whole = Field(default=0, description="steps over which the rate rises linearly")
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate as a share of the highest")
    fp32_master: bool = Field(
        default=True, description="keep float32 copies of bfloat16 parameters, so that small updates are not lost"
    )


class RanksSection(_Section):
    """How the processes that torchrun starts share the work."""

    dp: Count | None = Field(default=None, description="replicas, each with other samples; null for what is left")
    sp: Count = Field(default=1, description="processes that share a sequence, cut by heads in attention (Ulysses)")
    cp: Count = Field(default=1, description="processes that share a sequence, cut by rows in attention")
    tp: Count = Field(default=1, description="processes that share every matrix")
    zero: Literal[0, 2, 3] = Field(
        default=3, description="3 and 2 cut parameters, gradients and optimizer state over processes; 0 cuts nothing"
    )
    offload: bool = Field(default=False, description="parameters and optimizer state rest in host memory")

    @model_validator(mode="after")
    def _offload_of_what_is_cut(self) -> Self:
        if self.offload and self.zero == 0:
            raise ValueError("ranks.offload has no effect with ranks.zero 0, which cuts nothing: set zero to 2 or 3")
        return self


class EvaluateSection(_Section):
    """What is asked of the model on the way; nothing where `every` is null."""

    every: Count | None = Field(default=None, description="steps between evaluations; the last step has one, too")
    files: list[str] = Field(default=[], description="held-out text, as data.files: its loss and perplexity")
    tasks: tuple[str, ...] = Field(default=("needle",), description="long-context tasks, see docs/evaluate.md")
    lengths: tuple[Count, ...] | None = Field(
        default=None, description="tokens of the tasks' samples, such as [16K, 64K]; null for context"
    )
    depths: Count = Field(default=11, description="places of answers in each sample; more cost no time")
    samples: Count = Field(default=2, description="samples of each task and length")
    threshold: Fraction = Field(default=DEFAULT_THRESHOLD, description="least score of an effective length")
    generated: bool = Field(default=False, description="have the model answer in its own words, too")
    haystack: list[str] = Field(default=[], description="text around needles, as data.files; made up by default")
    seed: Whole = Field(default=0, description="seed of names, numbers and made-up text")

    @field_validator("files", "haystack", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or []

    @field_validator("tasks", mode="before")
    @classmethod
    def _task_list(cls, value: Any) -> Any:
        return _parts(value)

    @field_validator("lengths", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        parts = _parts(value)
        return tuple(parse_length(part) for part in parts) if isinstance(parts, (tuple, list)) else parts

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if self.every is None and "every" not in self.model_fields_set:  # else it was turned off
            given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if given:
                raise ValueError(
                    f"evaluate.{given[0]} has no effect without evaluate.every: set it to a number of steps"
                )
        elif self.every is not None and not (self.tasks or self.files):
            raise ValueError(
                "evaluate.every is set, and there is nothing to evaluate: set evaluate.files or evaluate.tasks"
            )
        self.settings(context=1)
        return self

    def settings(self, *, context: int) -> EvaluateSettings:
        """Return them as `trunkline.evaluate` takes them.

        Args:
            context: Tokens of samples where `lengths` says nothing.

        Raises:
            ValueError: One has a value that nothing can be done with.
        """
        lengths = (self.lengths or (context,)) if self.tasks else ()
        try:
            return EvaluateSettings(
                lengths, self.tasks, even_depths(self.depths), self.samples, self.seed, self.threshold
            )
        except ValueError as error:
            raise ValueError(f"evaluate.{error}") from None


class Recipe(_Section):
    """All settings of one training run."""

    model: ModelSection
    data: DataSection
    context: Count = Field(description="tokens of one sample: the global sequence length")
    chunk_size: Count | Literal["auto"] = Field(
        default="auto", description="tokens that stream through a layer at a time"
    )
    keep: tuple[Literal["attention", "kv"], ...] = Field(
        default=("attention",),
        description="what stays between forward and backward: [], [attention], [kv], [attention, kv]",
    )
    attn_strategy: Literal["auto", "resident", "head_groups", "streamed"] = Field(
        default="auto", description="how attention goes where not all fits: auto takes the first that does"
    )
    checkpoint_every: Count = Field(
        default=1, description="only the input of every N-th layer stays; those between are computed again"
    )
    device_budget: int | str | None = Field(
        default=None,
        description="most bytes kept on the device, such as 20GiB; what does not fit goes to host and disk",
    )
    host_budget: int | str | None = Field(default=None, description="most bytes kept in host memory")
    offload_dir: str | None = Field(
        default=None, description="folder for a scratch file, for what host memory has no room for"
    )
    disk_budget: int | str | None = Field(default=None, description="most bytes in it; null for what is free")
    prefetch: Count = Field(
        default=2, description="tensors of one store on the device at a time; 1 turns double buffering off"
    )
    compile: bool = Field(default=False, description="compile the layers with torch.compile, all but their attention")
    ranks: RanksSection = RanksSection()
    evaluate: EvaluateSection = EvaluateSection()
    batch_size: Count = Field(default=1, description="samples of one micro-batch (global)")
    gradient_accumulation: Count = Field(default=1, description="micro-batches of one step")
    steps: Count = Field(description="optimizer steps")
    optimizer: OptimizerSection = OptimizerSection()
    clip: Positive | None = Field(default=1.0, description="largest global gradient norm; null for no clipping")
    preflight: bool = Field(
        default=True, description="rehearse a step first: stop a run that does not fit, and choose chunk_size auto"
    )
    seed: Whole = Field(default=0, description="seed of initial weights, dropout and sample order")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    output: str = Field(description="folder that is written at the end")
    overwrite: bool = Field(default=False, description="replace the output folder of an earlier run")
    log_every: Count = Field(default=1, description="steps between printed lines; metrics.jsonl has every step")

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_list(cls, value: Any) -> Any:
        return () if value is None else _parts(value)

    @field_validator("keep")
    @classmethod
    def _keep_set(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names the same thing twice")
        return value

    @model_validator(mode="after")
    def _can_stream(self) -> Self:
        StreamConfig(**self.stream_settings)
        return self

    @property
    def stream_settings(self) -> dict[str, Any]:
        """The settings that are those of `trunkline.stream`, by name."""
        names = {field.name for field in dataclasses.fields(StreamConfig)} & set(type(self).model_fields)
        return {name: getattr(self, name) for name in names}

    @field_validator("device")
    @classmethod
    def _device_name(cls, value: str) -> str:
        kind, _, index = value.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
            raise ValueError(f"'{value}' is no device; use auto, cpu, cuda or cuda:0, cuda:1, …")
        return value

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.context < 2:
            raise ValueError("context must be at least 2: a token is predicted from the ones before it")
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) is larger than steps ({self.steps}); lower it"
            )
        return self

    @property
    def evaluate_settings(self) -> EvaluateSettings:
        """What is asked of the model on the way, as `trunkline.evaluate` takes it."""
        return self.evaluate.settings(context=self.context)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step (global)."""
        return self.context * self.batch_size * self.gradient_accumulation


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
