"""From a YAML file and the command line to a `Recipe`: overrides, aliases, and errors that name the mend.

The file and the command line are normalised on their own (aliases to real names), then laid over each other, so
`--context` on the command line wins over `sequence_len` in the file.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trunkline.train.recipe import Recipe

# Names people know from elsewhere. Every one is accepted with a notice that gives the name used here.
ALIASES: dict[str, str] = {
    "sequence_len": "context",
    "sequence_length": "context",
    "seq_len": "context",
    "seq_length": "context",
    "max_seq_length": "context",
    "max_seq_len": "context",
    "max_length": "context",
    "context_length": "context",
    "micro_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "grad_accum": "gradient_accumulation",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_steps": "steps",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "adam_epsilon": "optimizer.eps",
    "min_lr_ratio": "optimizer.min_lr_ratio",
    "max_grad_norm": "clip",
    "gradient_clipping": "clip",
    "clip_grad": "clip",
    "clip_grad_norm": "clip",
    "output_dir": "output",
    "dp_size": "ranks.dp",
    "data_parallel_size": "ranks.dp",
    "sp_size": "ranks.sp",
    "sequence_parallel_size": "ranks.sp",
    "ulysses_sequence_parallel_size": "ranks.sp",
    "cp_size": "ranks.cp",
    "context_parallel_size": "ranks.cp",
    "tp_size": "ranks.tp",
    "tensor_parallel_size": "ranks.tp",
    "zero_stage": "ranks.zero",
    "evaluate_every": "evaluate.every",
    "eval_every": "evaluate.every",
    "eval_steps": "evaluate.every",
    "eval_interval": "evaluate.every",
    "overwrite_output_dir": "overwrite",
    "logging_steps": "log_every",
    "log_interval": "log_every",
    "random_seed": "seed",
    "base_model": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "tokenizer": "data.tokenizer",
    "dataset_text_field": "data.text_field",
    "model.name_or_path": "model.path",
    "model.torch_dtype": "model.dtype",
    "model.precision": "model.dtype",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.warmup": "optimizer.warmup_steps",
    "optimizer.adam_epsilon": "optimizer.eps",
    "data.paths": "data.files",
    "data.path": "data.files",
    "data.data_files": "data.files",
    "data.tokenizer_path": "data.tokenizer",
    "data.dataset_text_field": "data.text_field",
}

Notice = Callable[[str], None]
_FREE_FORM = ("model.overrides",)


class RecipeError(ValueError):
    """The recipe or an override is wrong; the text is one paragraph for the user."""


def load_recipe(path: Path, overrides: Sequence[tuple[str, str]] = (), *, notice: Notice = print) -> Recipe:
    """Read a recipe file and lay command line overrides over it.

    Args:
        path: YAML file.
        overrides: Dotted names and their values as typed, in order.
        notice: Told about each alias.

    Returns:
        The checked recipe with all defaults filled in.

    Raises:
        RecipeError: Anything wrong with the file, a name or a value.
    """
    settings = dict(_without_aliases(_flatten(_read_yaml(path)), f"the recipe '{path}'", notice))
    settings.update(_without_aliases(parse_overrides(overrides), "the command line", notice))
    for name in settings:
        _require_known(name)
    try:
        return Recipe.model_validate(_nest(settings))
    except ValidationError as error:
        raise RecipeError(describe(error)) from error


def parse_overrides(overrides: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Type command line values by the schema: text where the setting is text, YAML (numbers, lists, null) elsewhere.

    Args:
        overrides: Dotted names and their values as typed.

    Returns:
        The same names with typed values; a name given twice keeps its last value.

    Raises:
        RecipeError: A name is unknown, or a value is no valid YAML.
    """
    typed: dict[str, Any] = {}
    for name, text in overrides:
        if name not in ALIASES:
            _require_known(name)
        if _takes_text(ALIASES.get(name, name)) and text not in ("null", "~"):
            typed[name] = text
            continue
        try:
            typed[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"--{name}: the value {text!r} cannot be read as a YAML value; quote it.") from error
    return list(typed.items())


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML that `load_recipe` reads back to an equal recipe."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def setting_names() -> list[str]:
    """Return the dotted names of all settings, in the order of the schema."""
    return [name for name, _ in _settings(Recipe)]


def describe(error: ValidationError) -> str:
    """Turn pydantic's findings into one paragraph: path, value, what is allowed."""
    findings = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        message = item["msg"].removeprefix("Value error, ").removesuffix(".")
        if item["type"] == "missing":
            findings.append(f"'{name}' is missing; set it in the recipe or with --{name} on the command line")
        elif isinstance(item["input"], (dict, BaseModel)) or not name:
            findings.append(f"{name}: {message}" if name and not message.startswith("set exactly") else message)
        else:
            findings.append(f"{name}: {message[0].lower()}{message[1:]} (got {item['input']!r})")
    return "; ".join(dict.fromkeys(findings)) + "."


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(
            f"the recipe '{path}' does not exist. Give the path of a YAML file, such as examples/quickstart.yaml."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the recipe '{path}' cannot be read ({error}). Give the path of a YAML text file."
        ) from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not a YAML document"
        raise RecipeError(f"the recipe '{path}' is not valid YAML{where}: {problem}. Mend that line.") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"the recipe '{path}' holds {'nothing' if content is None else type(content).__name__}, not settings. "
            "It must have lines such as 'context: 32768'; see examples/quickstart.yaml."
        )
    return content


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        is_section = name in Recipe.model_fields and _section(Recipe.model_fields[name].annotation) is not None
        if is_section and isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    # Whole values before dotted parts, so that `model.overrides.x` lands in the file's `model.overrides`.
    for name in sorted(settings, key=lambda name: name.count(".")):
        *parents, last = name.split(".")
        target = nested
        for parent in parents:
            inner = target.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{name}: '{parent}' is set to {inner!r}, not to a section with settings of its own.")
            target[parent] = target = dict(inner)
        target[last] = settings[name]
    return nested


def _without_aliases(
    settings: Iterator[tuple[str, Any]] | Sequence[tuple[str, Any]], source: str, notice: Notice
) -> list[tuple[str, Any]]:
    given: dict[str, str] = {}
    result = []
    for name, value in settings:
        real = ALIASES.get(name, name)
        if real in given:
            raise RecipeError(
                f"{source} sets both '{given[real]}' and '{name}', which mean the same; keep only '{real}'."
            )
        given[real] = name
        if real != name:
            notice(f"note: '{name}' is called '{real}' here; taken as {real}: {value}")
        result.append((real, value))
    return result


def _require_known(name: str) -> None:
    names = [known for known, _ in _settings(Recipe)]
    sections = [field for field, info in Recipe.model_fields.items() if _section(info.annotation) is not None]
    if name in names or name in sections or any(name.startswith(f"{free}.") for free in _FREE_FORM):
        return
    same_end = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
    near = same_end or difflib.get_close_matches(name, [*names, *sections, *ALIASES], n=1, cutoff=0.5)
    near = near or [known for known in names if difflib.SequenceMatcher(None, known.split(".")[-1], name).ratio() > 0.6]
    # An alias that is near leads to the name it stands for.
    hint = f"Did you mean '{ALIASES.get(near[0], near[0])}'?" if near else f"Settings are: {', '.join(names)}."
    raise RecipeError(f"'{name}' is not a setting. {hint}")


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner is None:
            yield f"{prefix}{field}", info.annotation
        else:
            yield from _settings(inner, f"{prefix}{field}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _takes_text(name: str) -> bool:
    annotation = dict(_settings(Recipe)).get(name)
    options = get_args(annotation) if get_origin(annotation) in (types.UnionType, typing.Union) else (annotation,)
    return str in options


def _is_union_branch(part: object) -> bool:
    """Pydantic puts the name of the union's branch into the path of an error; users did not write it."""
    return isinstance(part, str) and (
        part.startswith(("constrained-", "literal[", "function-")) or part in ("int", "str")
    )
