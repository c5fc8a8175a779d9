"""Recipes from a YAML file and the command line: dotted overrides, names of other trainers, errors with the fix.

Names of other trainers become ours in the file and on the command line separately, and then the command line replaces
the file. So `--context` on the command line replaces `sequence_len` in the file, and both in one place are an error.
pydantic's aliases cannot lead from one section to another (`lr` to `optimizer.lr`), and take the first of two names in
silence; so names are resolved here.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trunkline.train.recipe import Recipe

# Names of other trainers, accepted with a notice of the name here: each row is a setting and its other names.
_OTHER_NAMES = {
    "context": "sequence_len sequence_length seq_len seq_length max_seq_length max_seq_len max_length context_length",
    "batch_size": "micro_batch_size per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps grad_accum",
    "steps": "max_steps num_steps train_steps",
    "optimizer.lr": "lr learning_rate optimizer.learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.warmup_steps": "warmup_steps optimizer.warmup",
    "optimizer.eps": "adam_epsilon optimizer.adam_epsilon",
    "optimizer.min_lr_ratio": "min_lr_ratio",
    "clip": "max_grad_norm gradient_clipping clip_grad clip_grad_norm",
    "output": "output_dir",
    "overwrite": "overwrite_output_dir",
    "log_every": "logging_steps log_interval",
    "seed": "random_seed",
    "ranks.dp": "dp_size data_parallel_size",
    "ranks.sp": "sp_size sequence_parallel_size ulysses_sequence_parallel_size",
    "ranks.cp": "cp_size context_parallel_size",
    "ranks.tp": "tp_size tensor_parallel_size",
    "ranks.zero": "zero_stage",
    "evaluate.every": "evaluate_every eval_every eval_steps eval_interval",
    "model.path": "base_model model_name_or_path model.name_or_path",
    "model.dtype": "torch_dtype model.torch_dtype model.precision",
    "data.files": "data.paths data.path data.data_files",
    "data.tokenizer": "tokenizer data.tokenizer_path",
    "data.text_field": "dataset_text_field data.dataset_text_field",
}
ALIASES = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}

Notice = Callable[[str], None]
_FREE_FORM = "model.overrides."  # any name may follow


class RecipeError(ValueError):
    """Error in a recipe or an override; the text is one paragraph for the user."""


def load_recipe(path: Path, overrides: Sequence[tuple[str, str]] = (), *, notice: Notice = print) -> Recipe:
    """Read a recipe file and apply the overrides of the command line.

    Args:
        path: YAML file.
        overrides: dotted names and their values as typed, in order; the last one of a name counts.
        notice: called with a line for each name of another trainer.

    Returns:
        The checked recipe, with all defaults filled in.

    Raises:
        RecipeError: the file, a name or a value is wrong.
    """
    settings = dict(_resolve_aliases(_flatten(_read_yaml(path)), f"the recipe '{path}'", notice))
    settings.update(_resolve_aliases(parse_overrides(overrides), "the command line", notice))
    for name in settings:
        _check_known(name)
    try:
        return Recipe.model_validate(_nest(settings))
    except ValidationError as error:
        raise RecipeError(describe(error)) from error


def parse_overrides(overrides: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Parse values of the command line by the schema: text for a setting that takes text, else YAML.

    `null` and `~` are None for every setting.

    Args:
        overrides: dotted names and their values as typed.

    Returns:
        The names, other trainers' unchanged, with parsed values; a name given twice keeps its last value.

    Raises:
        RecipeError: a name is unknown, or a value is not valid YAML.
    """
    fields = dict(recipe_fields())
    parsed: dict[str, Any] = {}
    for name, text in overrides:
        real = ALIASES.get(name, name)
        _check_known(real)
        kind = fields[real].annotation if real in fields else None
        members = get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        if str in members and text not in ("null", "~"):
            parsed[name] = text
            continue
        try:
            parsed[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"--{name}: the value {text!r} cannot be read as a YAML value; quote it.") from error
    return list(parsed.items())


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML; `load_recipe` reads an equal recipe from it."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def recipe_fields(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name (behind `prefix`) and the field of each setting, in the order of the schema."""
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from recipe_fields(inner, f"{prefix}{name}.")


def describe(error: ValidationError) -> str:
    """Return pydantic's findings as one paragraph: each with the setting, the value, and the values it may have."""
    findings = []
    for item in error.errors():
        name = _name_of(item["loc"])
        message = item["msg"].removeprefix("Value error, ").removesuffix(".")
        if item["type"] == "missing":
            findings.append(f"'{name}' is missing; set it in the recipe or with --{name} on the command line")
        elif isinstance(item["input"], (dict, BaseModel)) or not name:
            findings.append(f"{name}: {message}" if name and not message.startswith("set exactly") else message)
        else:
            findings.append(f"{name}: {message[0].lower()}{message[1:]} (got {item['input']!r})")
    return "; ".join(dict.fromkeys(findings)) + "."


def _name_of(location: Sequence[str | int]) -> str:
    """Return the dotted name in the location of a finding, without pydantic's names for the members of a union."""
    section: type[BaseModel] | None = Recipe
    parts = []
    for part in location:
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is not None or isinstance(part, int):
            parts.append(str(part))
        section = None if field is None else _section(field)
    return ".".join(parts)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(
            f"the recipe '{path}' does not exist. Give the path of a YAML file, such as examples/quickstart.yaml."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"the recipe '{path}' cannot be read ({error}). Give the path of a YAML text file."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not a YAML document"
        raise RecipeError(f"the recipe '{path}' is not valid YAML{place}: {problem}. Fix that line.") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"the recipe '{path}' holds {'nothing' if content is None else type(content).__name__}, not settings. "
            "It must have lines such as 'context: 32768'; see examples/quickstart.yaml."
        )
    return content


def _flatten(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values: one for each setting of a section."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value and key in _sections():
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield str(key), value


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    # Whole values before dotted parts: `--model.overrides.x` adds to the file's `model.overrides`.
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


def _resolve_aliases(settings: Iterable[tuple[str, Any]], source: str, notice: Notice) -> Iterator[tuple[str, Any]]:
    """Rename settings from other trainers' names to ours; refuse two names of one setting in one source."""
    names: dict[str, str] = {}
    for name, value in settings:
        real = ALIASES.get(name, name)
        if real in names:
            raise RecipeError(
                f"{source} sets both '{names[real]}' and '{name}', which mean the same; keep only '{real}'."
            )
        names[real] = name
        if real != name:
            notice(f"note: '{name}' is called '{real}' here; taken as {real}: {value}")
        yield real, value


def _check_known(name: str) -> None:
    """Refuse an unknown setting; the text has the nearest name, or all of them."""
    names, sections = [known for known, _ in recipe_fields()], _sections()
    if name in names or name in sections or name.startswith(_FREE_FORM):
        return
    same_end = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
    near = same_end or difflib.get_close_matches(name, [*names, *sections, *ALIASES], n=1, cutoff=0.7)
    near = near or [known for known in names if difflib.SequenceMatcher(None, known.split(".")[-1], name).ratio() > 0.6]
    hint = f"Did you mean '{ALIASES.get(near[0], near[0])}'?" if near else f"Settings are: {', '.join(names)}."
    raise RecipeError(f"'{name}' is not a setting. {hint}")


def _sections() -> list[str]:
    return [name for name, field in Recipe.model_fields.items() if _section(field) is not None]


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
