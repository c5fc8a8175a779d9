"""Settings of an evaluation that the command line leaves open: lengths and tasks that suit the model."""

from __future__ import annotations

from typing import Any

from trunkline.api import streamed_forward
from trunkline.evaluate import (
    TASKS,
    EvaluateSettings,
    TextHaystack,
    check_lengths,
    even_depths,
    length_text,
)
from trunkline.hf import probe
from trunkline.units import parse_tokens

# The lengths of RULER (Hsieh et al., COLM 2024), so that effective lengths compare with published ones.
_LENGTHS = tuple(2**power for power in range(12, 18))


def choose_settings(
    model: Any,
    tokenizer: Any,
    *,
    tasks: str | None,
    lengths: str | None,
    depths: int,
    samples: int,
    seed: int,
    threshold: float,
    haystack: TextHaystack | None,
) -> tuple[EvaluateSettings, list[str]]:
    """Return the settings of an evaluation, and a line for each choice made here.

    Args:
        model: the model to evaluate.
        tokenizer: its tokenizer.
        tasks: names with commas between them, `none`, or None for all that fit in the lengths.
        lengths: tokens of samples with commas between them, or None for those the model has positions for.
        depths: number of depths, evenly spaced.
        samples: samples of each task and length.
        seed: seed of names, numbers and texts.
        threshold: least score of an effective length.
        haystack: text around needles; None makes some up.

    Returns:
        Settings, without tasks and lengths where `tasks` is `none`; lines for the user about lengths that were not
        given, and about tasks that were left out.

    Raises:
        ValueError: a setting is wrong, the lengths or depths are too few for a task that was named, or no task fits.
    """
    if tasks == "none":
        return EvaluateSettings((), (), samples=samples, seed=seed), []
    tokens, notes = _lengths(lengths, model)

    def checked(names: tuple[str, ...]) -> EvaluateSettings:
        settings = EvaluateSettings(tokens, names, even_depths(depths), samples, seed, threshold)
        check_lengths(settings, tokenizer, haystack)
        return settings

    try:
        if tasks is not None:
            return checked(tuple(name.strip() for name in tasks.split(","))), notes
        names, too_large = [], {}
        for name in TASKS:
            try:
                checked((name,))
                names.append(name)
            except ValueError as error:
                if not str(error).startswith(("lengths:", "depths:")):
                    raise
                too_large[name] = error
        if not names:
            raise too_large.popitem()[1]
        if too_large:
            small = f"{length_text(min(tokens))}, or {depths} depths, are too few"
            notes.append(f"tasks left out, since {small} for them: {', '.join(too_large)}")
        return checked(tuple(names)), notes
    except ValueError as error:  # the settings' names are the options'
        is_setting = str(error).partition(":")[0] in EvaluateSettings.__dataclass_fields__
        raise ValueError(f"--{error}" if is_setting else str(error)) from None


def _lengths(text: str | None, model: Any) -> tuple[tuple[int, ...], list[str]]:
    """Return the lengths given, or RULER's up to the positions of the model, and a line about the choice."""
    if text is not None:
        try:
            return tuple(parse_tokens(part) for part in text.split(",")), []
        except ValueError as error:
            raise ValueError(f"--lengths {text}: {error}, with commas between several.") from None
    positions = positions_of(model)
    if positions is None:
        lengths, why = _LENGTHS[:4], "the model does not say how many positions it has"
    else:
        lengths = tuple(length for length in _LENGTHS if length <= positions) or (positions,)
        why = f"the model has {positions:,} positions"
    return lengths, [f"lengths: {', '.join(map(length_text, lengths))} ({why}; --lengths sets others)"]


def positions_of(model: Any) -> int | None:
    """Return the number of positions that a model was made for; None if its config has none."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions


def check_length(model: Any, tokens: int) -> None:
    """Refuse a length that a streamed model has no positions for.

    Raises:
        ValueError: the model cannot take this many tokens.
    """
    try:
        probe.check_length(streamed_forward(model, "evaluate").decoder, tokens - 1)
    except ValueError as error:
        raise ValueError(
            f"--lengths, --perplexity: {tokens:,} tokens cannot be evaluated. {error} Give shorter lengths or files."
        ) from None
