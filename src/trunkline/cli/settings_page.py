"""The page docs/settings.md, made from the schema of the recipe; `python -m trunkline.cli.settings_page` prints it."""

from __future__ import annotations

import json
from typing import Any

from trunkline.train.recipe import Recipe

COMMAND = "python -m trunkline.cli.settings_page > docs/settings.md"

_INTRODUCTION = f"""# Settings

<!-- Made by `{COMMAND}`. Do not edit. -->

A setting has one name, one default and one meaning: in a recipe (`trunkline train`, `trunkline plan`), as an override
on the command line (`--chunk_size 8192`, `--optimizer.lr 3e-4`) and, for streaming and memory, as a keyword
argument (`trunkline.stream(model, chunk_size=8192)`). `trunkline generate` and `trunkline evaluate` take the settings
that inference uses as options (`--chunk-size 8192`). Bytes are a number, or text such as `24GiB` (1024-based) or
`500MB` (1000-based). Lengths and sizes are of the whole sequence and the whole batch, not per device.
"""
_GROUPS = {
    "streaming": ("Streaming", "How a step runs. `stream` takes `progress`, too: a function called before each chunk."),
    "memory": ("Memory", "Where activations rest: on the device, in host memory, on disk."),
    "ranks": ("Ranks", "Which processes share the work; see [ranks.md](ranks.md)."),
    "run": ("Run", "Length, batch, steps, output; see [train.md](train.md)."),
    "model": ("Model", "Set exactly one of `model.preset` and `model.path`."),
    "data": ("Data", "Documents are cut into samples as [train.md](train.md) says."),
    "optimizer": ("Optimizer", "AdamW, with linear warm-up and cosine decay."),
    "evaluate": ("Evaluation", "Evaluations during training; see [evaluate.md](evaluate.md)."),
}
_TYPES = {"boolean": "true, false", "string": "text", "array": "list", "object": "fields"}


def settings_page() -> str:
    """Return docs/settings.md as text."""
    schema = Recipe.model_json_schema()
    tables = {group: settings_table(schema, group) for group in _GROUPS}
    return "\n".join(
        [_INTRODUCTION, *(f"## {_GROUPS[name][0]}\n\n{_GROUPS[name][1]}\n\n{tables[name]}" for name in tables)]
    )


def settings_table(schema: dict[str, Any], group: str) -> str:
    """Return a Markdown table of the settings of a group: name, type, default, meaning.

    Args:
        schema: JSON schema of the recipe.
        group: `streaming`, `memory`, `run` for the rest of the recipe itself, or the name of a section.
    """
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    reference = schema["properties"].get(group, {}).get("$ref")
    section = schema if reference is None else schema["$defs"][reference.rpartition("/")[2]]
    for name, field in section["properties"].items():
        if reference is None and ("$ref" in field or field.get("group", "run") != group):
            continue
        dotted = name if reference is None else f"{group}.{name}"
        default = "required" if name in section.get("required", ()) else f"`{_default(field)}`"
        rows.append(f"| `{dotted}` | {_type(field)} | {default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def _type(field: dict[str, Any]) -> str:
    """Return the type of a setting in the words of YAML."""
    if field.get("unit") == "bytes":
        return "bytes, `auto`" if field["default"] == "auto" else "bytes"
    if "anyOf" in field:
        return ", ".join(dict.fromkeys(_type(member) for member in field["anyOf"] if member.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    return _TYPES.get(field["type"], str(field["type"]))


def _default(field: dict[str, Any]) -> str:
    default = field.get("default", {})
    return default if isinstance(default, str) else json.dumps(default).replace('"', "")


if __name__ == "__main__":
    print(settings_page(), end="")
