"""Settings of streaming: one declaration for Python, recipes, the command line and the docs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from trunkline.cli.app import app
from trunkline.cli.settings_page import COMMAND, settings_page
from trunkline.config import StreamConfig, StreamSettings, declared_settings, resolve_config
from trunkline.train.recipe import Recipe

DECLARED = {each.name: each for each in declared_settings()}
IN_RECIPE = [name for name, each in DECLARED.items() if each.setting.in_recipe]


def test_keyword_arguments_are_typed_as_the_config() -> None:
    assert get_type_hints(StreamSettings) == {name: each.type for name, each in DECLARED.items()}
    assert list(DECLARED) == [field.name for field in dataclasses.fields(StreamConfig)]


def test_declared_settings_have_a_group_and_one_sentence_of_help() -> None:
    for each in DECLARED.values():
        assert each.setting.group in ("streaming", "memory", "ranks")
        assert re.fullmatch(r"[a-z].*[^.]", each.setting.help), each


def test_the_recipe_has_every_declared_setting_with_its_default_and_help() -> None:
    assert set(DECLARED) - set(IN_RECIPE) == {"progress"}
    properties = Recipe.model_json_schema()["properties"]
    for name in IN_RECIPE:
        each, field = DECLARED[name], Recipe.model_fields[name]
        assert (field.default, field.description) == (each.default, each.setting.help)
        assert (properties[name]["group"], properties[name]["unit"]) == (each.setting.group, each.setting.unit)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("generate", {"keep", "checkpoint_every", "attn_strategy", "logits_budget"}),
        ("evaluate", {"keep", "checkpoint_every"}),
    ],
)
def test_commands_have_an_option_for_each_setting_that_has_an_effect(command: str, missing: set[str]) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name in IN_RECIPE:
        option = f"--{name.replace('_', '-')} "
        assert (option in text) == (name not in missing), option
    for panel in ("Streaming", "Memory"):
        assert f" {panel} " in text


def test_the_page_of_settings_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_page(), f"docs/settings.md is out of date; run {COMMAND}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 8}, r"chunk is not a setting of stream\(\): did you mean chunk_size\?"),
        ({"checkpoint_evry": 8}, "did you mean checkpoint_every"),
        ({"qqqq": 8}, r"qqqq is not a setting of stream\(\): Settings are chunk_size, keep"),
        ({"chunk_size": 0}, "chunk_size=0: give a positive whole number of tokens, or 'auto'"),
        ({"chunk_size": True}, "chunk_size=True: give a positive whole number of tokens"),
        ({"keep": ["all"]}, r"keep=\['all'\]: 'all' is unknown; choose out of \['attention', 'kv'\]"),
        ({"keep": 1}, "keep=1: give names out of"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: give a positive whole number"),
        ({"attn_kernel": "fa9"}, "attn_kernel='fa9': choose one of auto, cpu_flash, cuda_flash, math"),
        ({"attn_strategy": "fast"}, "attn_strategy='fast': choose one of auto, resident, head_groups, streamed"),
        ({"attn_strategy": "streamed"}, "attn_strategy='streamed' has no effect without a device_budget: set one"),
        ({"logits_budget": 0}, "logits_budget=0: give a positive number of bytes, or 'auto'"),
        ({"compile": "yes"}, "compile='yes': give True or False"),
        ({"progress": 5}, "progress=5: give a function that takes a Progress"),
        ({"device_budget": "lots"}, "device_budget='lots': give a number of bytes, or one with a unit"),
        ({"host_budget": -1}, "host_budget=-1: give a number of bytes"),
        ({"device_budget": 1, "offload_dir": "nowhere/at/all"}, "offload_dir='nowhere/at/all' is not a folder: create"),
        ({"offload_dir": "."}, "offload_dir has no effect without a device_budget"),
        ({"disk_budget": 1}, "disk_budget has no effect without offload_dir: set offload_dir to a folder"),
        ({"prefetch": 0}, "prefetch=0: give a positive whole number"),
    ],
)
def test_a_wrong_setting_is_named_with_the_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_config(None, settings)


def test_keywords_replace_fields_of_a_config() -> None:
    config = resolve_config(StreamConfig(chunk_size=8, prefetch=3), {"prefetch": 1})
    assert (config.chunk_size, config.prefetch) == (8, 1)
    with pytest.raises(ValueError, match="give a StreamConfig, or its fields as keyword arguments"):
        resolve_config({"chunk_size": 8}, {})  # type: ignore[arg-type]


def test_the_declaration_and_the_help_need_no_torch() -> None:
    code = inspect.cleandoc("""
        import sys
        from trunkline.config import declared_settings
        list(declared_settings())
        from trunkline.cli.app import run
        run(["--help"]), run(["generate", "--help"])
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
