"""The recipe: every setting of `trunkline train`, with its type, default and meaning.

Settings of streaming are made from `declared_settings()`; all others are declared here. `train.load_recipe` reads YAML
files and the command line into a `Recipe`, and docs/settings.md is made from it. Lengths and batch sizes are global: of
the whole sequence and of all replicas. Budgets of bytes are those of one process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from trunkline.config import Declared, StreamConfig, declared_settings
from trunkline.evaluate.evaluation_settings import DEFAULT_THRESHOLD, EvaluateSettings, even_depths
from trunkline.train.presets import PRESETS
from trunkline.units import parse_tokens


def _refuse_bool(value: Any) -> Any:
    # YAML reads `steps: yes` as true, and Python's True is the integer 1.
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _as_tokens(value: Any) -> Any:
    return parse_tokens(value) if isinstance(value, str) and value != "auto" else value


def _as_list(value: Any) -> Any:
    """Return a tuple for one integer, for text with commas, or for null (empty); anything else as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _refuse_repeated(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) != len(value):
        raise ValueError("names the same thing twice")
    return value


def _as_files(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, le=1)]
Decay = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)]
Files = Annotated[list[str], BeforeValidator(_as_files)]
Dtype = Literal["float32", "bfloat16"]


class _Section(BaseModel):
    """Base of the recipe and its sections: unknown names are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(_Section):
    """The model: `preset` or `path`, exactly one of them."""

    preset: str | None = Field(default=None, description="architecture to train from scratch, see train.md")
    path: str | None = Field(default=None, description="local folder with a Hugging Face model to train further")
    dtype: Dtype = Field(default="bfloat16", description="type of the parameters")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="fields of the Hugging Face config to replace, such as num_hidden_layers"
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_names(cls, value: Any) -> Any:
        names = {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}
        return names.get(value, value) if isinstance(value, str) else value

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
    """The text to train on."""

    files: Files = Field(description="text files, .jsonl files, folders, glob patterns, or the word stdlib")
    tokenizer: str | None = Field(
        None,
        description="bytes, or a local folder with a Hugging Face tokenizer; default: model.path's own, else bytes",
    )
    text_field: str = Field(default="text", description="field of a .jsonl line that holds the text")


class OptimizerSection(_Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: Positive = Field(default=3e-4, description="highest learning rate")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="decay rates of AdamW's two averages")
    eps: Positive = Field(default=1e-8, description="term added to the denominator of an update")
    weight_decay: NonNegative = Field(
        default=0.1, description="decay of matrices; vectors (norms, biases) are never decayed"
    )
    warmup_steps: Whole = Field(default=0, description="steps over which the learning rate rises linearly")
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate as a share of the highest")
    fp32_master: bool = Field(
        default=True, description="keep float32 copies of bfloat16 parameters, so that small updates are not lost"
    )


class RanksSection(_Section):
    """Mesh of the processes that torchrun starts, and sharding of parameters over it."""

    dp: Count | None = Field(default=None, description="replicas, each with its own samples; null takes the rest")
    sp: Count = Field(default=1, description="processes that share a sequence, by heads in attention (Ulysses)")
    cp: Count = Field(default=1, description="processes that share a sequence, by query rows in attention")
    tp: Count = Field(default=1, description="processes that share every matrix (tensor parallelism)")
    zero: Literal[0, 2, 3] = Field(
        default=3, description="ZeRO stage: 3 and 2 shard parameters, gradients and optimizer state; 0 shards nothing"
    )
    offload: bool = Field(default=False, description="keep parameters and optimizer state in host memory")

    @model_validator(mode="after")
    def _offload_needs_sharding(self) -> Self:
        if self.offload and self.zero == 0:
            raise ValueError("ranks.offload has no effect with ranks.zero 0, which shards nothing: set zero to 2 or 3")
        return self


class EvaluateSection(_Section):
    """Evaluations during training; none where `every` is null."""

    every: Count | None = Field(default=None, description="steps between evaluations; the last step has one, too")
    files: Files = Field(default=[], description="held-out text, as data.files: its loss and perplexity are measured")
    tasks: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        default=("needle",), description="long-context tasks, see evaluate.md; [] for held-out text alone"
    )
    lengths: tuple[Count, ...] | None = Field(
        default=None, description="tokens of the tasks' samples, such as [16K, 64K]; null for context"
    )
    depths: Count = Field(default=11, description="depths of answers in each sample; more cost no time")
    samples: Count = Field(default=2, description="samples of each task and length")
    threshold: Fraction = Field(default=DEFAULT_THRESHOLD, description="least score of an effective length")
    generated: bool = Field(
        default=False, description="generate answers, too, not only score the right ones; takes longer"
    )
    haystack: Files = Field(default=[], description="text around needles, as data.files; made up by default")
    seed: Whole = Field(default=0, description="seed of names, numbers and made-up text")

    @field_validator("lengths", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        parts = value if value is None else _as_list(value)
        return tuple(parse_tokens(part) for part in parts) if isinstance(parts, (tuple, list)) else parts

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.every is None and "every" not in self.model_fields_set:  # an explicit null turns evaluations off
            changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if changed:
                raise ValueError(
                    f"evaluate.{changed[0]} has no effect without evaluate.every: set it to a number of steps"
                )
        elif self.every is not None and not (self.tasks or self.files):
            raise ValueError(
                "evaluate.every is set, and there is nothing to evaluate: set evaluate.files or evaluate.tasks"
            )
        self.settings(context=1)
        return self

    def settings(self, *, context: int) -> EvaluateSettings:
        """Return the settings for `trunkline.evaluate`.

        Args:
            context: tokens of the samples where `lengths` is null.

        Raises:
            ValueError: a setting is out of range, or a task is unknown.
        """
        lengths = (self.lengths or (context,)) if self.tasks else ()
        try:
            return EvaluateSettings(
                lengths, self.tasks, even_depths(self.depths), self.samples, self.seed, self.threshold
            )
        except ValueError as error:
            raise ValueError(f"evaluate.{error}") from None


class _Basics(_Section):
    """Settings that stand first in a recipe."""

    model: ModelSection
    data: DataSection
    context: Annotated[Count, BeforeValidator(_as_tokens)] = Field(
        description="tokens of one sample: the length of the whole sequence"
    )


def _field(declared: Declared) -> tuple[Any, Any]:
    """Return the type and the field of a declared setting for pydantic; StreamConfig checks the values."""
    kind, setting = declared.type, declared.setting
    if get_origin(kind) is Collection:
        kind = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_refuse_repeated)]
    elif setting.unit == "tokens":
        kind = Annotated[kind, BeforeValidator(_refuse_bool), BeforeValidator(_as_tokens)]
    elif kind is not bool:
        kind = Annotated[kind, BeforeValidator(_refuse_bool)]
    extra: dict[str, Any] = {"group": setting.group, "unit": setting.unit}
    return kind, Field(default=declared.default, description=setting.help, json_schema_extra=extra)


_STREAMING: dict[str, Any] = {each.name: _field(each) for each in declared_settings() if each.setting.in_recipe}

if TYPE_CHECKING:

    class _Streaming(_Basics):  # a checker of types cannot see the fields made at run time
        def __getattr__(self, name: str) -> Any: ...

else:
    _Streaming = create_model("_Streaming", __base__=_Basics, **_STREAMING)


class Recipe(_Streaming):
    """All settings of one training run; those of streaming are fields, too."""

    ranks: RanksSection = RanksSection()
    evaluate: EvaluateSection = EvaluateSection()
    batch_size: Count = Field(default=1, description="samples of one micro-batch (global); ranks.dp must divide it")
    gradient_accumulation: Count = Field(default=1, description="micro-batches of one step")
    steps: Count = Field(description="optimizer steps")
    optimizer: OptimizerSection = OptimizerSection()
    clip: Positive | None = Field(default=1.0, description="largest global gradient norm; null for no clipping")
    preflight: bool = Field(
        default=True,
        description="estimate a step first: stop a run that does not fit, and choose chunk_size where it is auto",
    )
    seed: Whole = Field(default=0, description="seed of initial weights, dropout and sample order")
    device: str = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda or cuda:N")
    output: str = Field(description="folder to write at the end of the run")
    overwrite: bool = Field(default=False, description="replace the output folder of an earlier run")
    log_every: Count = Field(default=1, description="steps between printed lines; metrics.jsonl has every step")

    @property
    def stream_settings(self) -> dict[str, Any]:
        """Settings of streaming by name: keyword arguments of `trunkline.stream`, without `mesh` and `progress`."""
        return {name: getattr(self, name) for name in _STREAMING}

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        kind, _, index = value.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
            raise ValueError(f"'{value}' is no device; use auto, cpu, cuda or cuda:0, cuda:1, …")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        StreamConfig(**self.stream_settings)
        if self.context < 2:
            raise ValueError("context must be at least 2: a token is predicted from the ones before it")
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) is larger than steps ({self.steps}); lower it"
            )
        return self

    @property
    def evaluate_settings(self) -> EvaluateSettings:
        """Settings of the evaluations during training, for `trunkline.evaluate`."""
        return self.evaluate.settings(context=self.context)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.context * self.batch_size * self.gradient_accumulation
