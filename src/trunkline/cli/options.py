"""The application, the decorator that adds a command to it, and options that several commands share.

Options of streaming are made from `declared_settings()`: their names, defaults and help are those of `StreamConfig`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from trunkline.config import Declared, StreamConfig, declared_settings

app = typer.Typer(
    name="trunkline",
    help="Train Hugging Face language models on very long contexts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# A recipe's settings are no options of typer: the recipe's schema has the only list of them.
RECIPE_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

RecipeArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [--dotted.key VALUE]...",
        help="Recipe (YAML), then settings that replace those in it, such as --steps 10 or --optimizer.lr=3e-4.",
    ),
]
ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder with a Hugging Face model and its tokenizer.")
]
Dtype = Annotated[str, typer.Option(metavar="auto|bfloat16|float16|float32", help="Type of the weights.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Device that the model runs on.")]


def command(*, without: Collection[str] = (), **details: Any) -> Callable[[Callable[..., int | None]], Any]:
    """Return a decorator that adds a function to the application, as a command with its name and docstring.

    The function's parameters are the arguments and options of the command. A parameter annotated `StreamConfig`
    becomes one option for each declared setting. The function returns the exit code; None is 0.

    Args:
        without: declared settings that have no effect in this command.
        **details: further arguments of `typer.Typer.command`, such as `epilog`.
    """

    def add(function: Callable[..., int | None]) -> Any:
        hints = get_type_hints(function, include_extras=True)
        declared = [d for d in declared_settings() if d.setting.in_recipe and d.name not in without]
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            if hint is StreamConfig:
                parameters += map(_option, declared)
            else:
                parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

        # typer would turn an interruption of the work into an error of its own. It gets the work back undone, and
        # `trunkline.cli.app.run` does it.
        def prepared(**arguments: Any) -> Callable[[], int | None]:
            def work() -> int | None:
                if StreamConfig in hints.values():
                    settings = {d.name: _parsed(arguments.pop(d.name)) for d in declared}
                    config = StreamConfig(**settings)
                    arguments.update({name: config for name, hint in hints.items() if hint is StreamConfig})
                return function(**arguments)

            return work

        prepared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        prepared.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(function.__name__, help=inspect.getdoc(function), **details)(prepared)
        return function

    return add


def _option(declared: Declared) -> inspect.Parameter:
    """Return the parameter that typer makes a setting's option from."""
    setting, name = declared.setting, f"--{declared.name.replace('_', '-')}"
    choices = get_args(declared.type) if get_origin(declared.type) is Literal else ()
    metavar = "|".join(choices) or {"bytes": "BYTES", "tokens": "TOKENS", "chunks": "N"}.get(setting.unit)
    if declared.default == "auto" and not choices:
        metavar = f"{metavar}|auto"
    if declared.name == "offload_dir":
        metavar = "FOLDER"
    kind = declared.type if declared.type in (int, bool) else str | None if declared.default is None else str
    sentence = f"{setting.help[0].upper()}{setting.help[1:]}."
    panel = setting.group.capitalize()
    option = typer.Option(declared.default, name, metavar=metavar, help=sentence, rich_help_panel=panel)
    return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _parsed(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it lies below, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def split_recipe_arguments(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Split arguments into the recipe and the settings that replace its own, in any order.

    Args:
        arguments: words; `--key value`, `--key=value`, and `--key` alone for true.

    Returns:
        Path of the recipe, and dotted names (each `-` in them replaced by `_`) with their values as typed.

    Raises:
        ValueError: there is no recipe, or more than one.
    """
    recipes: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            recipes.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        overrides.append((name.replace("-", "_"), value))
    if len(recipes) != 1:
        given = f"got {len(recipes)}: {', '.join(recipes)}" if recipes else "got none"
        raise ValueError(
            f"give one recipe ({given}). Write: trunkline train recipe.yaml --steps 10 "
            "(quote a value that has spaces or wildcards)."
        )
    return Path(recipes[0]), overrides
