"""Arguments of a streamed forward: checked once, before the first sweep, and turned into a `Batch`."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trunkline.engine import documents
from trunkline.engine.batch import IGNORE, Batch

_FIXES = {
    "output_router_logits": "the auxiliary loss of experts is not supported yet: set it to False",
    "inputs_embeds": "pass input_ids (prompt and prefix tuning, which make embeddings of their own, are not supported)",
    "cache": "it goes without labels",
    "past_key_values": "it goes without labels",
    "use_cache": "it goes without labels",
    "output_hidden_states": "leave it out: the hidden states of all layers never exist at once",
    "output_attentions": "leave it out: attention weights never exist",
}
_READ = {
    "input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep",
    "return_dict", *documents.ARGUMENTS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Checked arguments of a forward, of the whole sequence on every rank.

    Attributes:
        batch: token ids, positions, targets and documents.
        logits_to_keep: number of last positions whose logits are wanted, 1 … S; 0 with targets.
        return_dict: whether a ModelOutput is wanted instead of a tuple.
    """

    batch: Batch
    logits_to_keep: int
    return_dict: bool


def read(given: dict[str, Any], name: str, vocab_size: int) -> ForwardInputs:
    """Check the arguments of a forward, and turn them into a batch.

    Labels are shifted by one, and the last token of each document gets no target; `shift_labels` are taken as they are.
    Padding gets no target, and columns that are padding in every row are cut off. Targets of documents of one token
    each cause a warning.

    Args:
        given: arguments by name, for the whole sequence; None stands for an argument that was not given.
        name: class name of the model, for messages.
        vocab_size: number of token embeddings of the model; token ids and labels must be below it.

    Returns:
        The checked inputs.

    Raises:
        ValueError: an argument is missing, of the wrong shape or range, or not supported.
    """
    ids_BS = token_ids(given, name, vocab_size)
    lengths_B = _lengths(given.get("attention_mask"), ids_BS)
    starts, position_ids = documents.read(given, ids_BS, lengths_B)
    targets = _targets(given.get("labels"), given.get("shift_labels"), ids_BS, vocab_size)
    if targets is not None and ids_BS.shape[1] > 1 and all(len(each) == ids_BS.shape[1] for each in starts):
        warnings.warn(
            "every token is a document of its own, so that none has a target: are position_ids all 0, or document_ids "
            "all different?",
            stacklevel=2,
        )
    if targets is not None and given.get("shift_labels") is None:
        targets = documents.without_last(targets, starts, IGNORE)
    keep = given.get("logits_to_keep")
    keep = 0 if keep is None else keep
    return_dict = given.get("return_dict") is not False
    if targets is None:
        if not isinstance(keep, int) or keep < 0:  # transformers also takes a tensor of places
            raise ValueError(f"logits_to_keep={keep!r}: give a number of last positions (0 and 1 both give the last).")
        if lengths_B is not None:
            raise ValueError(
                "attention_mask has padding, and there are no labels: the last position of a shorter row is padding. "
                "Pass rows of one length together, or one row at a time."
            )
        return ForwardInputs(
            Batch(ids_BS, position_ids, documents=starts), min(max(keep, 1), ids_BS.shape[1]), return_dict
        )
    if not isinstance(keep, int) or keep != 0:
        raise ValueError("logits_to_keep goes without labels: with labels the loss is returned, and no logits.")
    if lengths_B is not None:
        # Padding counts for nothing; columns that are padding in every row are not computed at all.
        places = torch.arange(targets.shape[1], device=ids_BS.device)
        last = 0 if given.get("shift_labels") is not None else 1  # the token after the last real one is padding
        targets = targets.masked_fill(places >= (lengths_B[:, None] - last), IGNORE)
        longest = max(int(lengths_B.max()), 1)
        ids_BS, targets = ids_BS[:, :longest], targets[:, :longest]
        position_ids = None if position_ids is None else position_ids[:, :longest]
        starts = documents.within(starts, longest)
    num_targets = _count(given.get("num_items_in_batch"), targets)
    return ForwardInputs(Batch(ids_BS, position_ids, targets, num_targets, documents=starts), 0, return_dict)


def token_ids(given: dict[str, Any], name: str, vocab_size: int) -> Tensor:
    """Check and return token ids (B, S), and refuse arguments that a streamed forward does not read.

    Arguments and errors are those of `read`. An unread argument that is None or False is accepted.
    """
    for argument, value in given.items():
        if argument not in _READ and value is not None and value is not False:
            close = difflib.get_close_matches(argument, _READ, 1)
            fix = _FIXES.get(argument, f"leave it out, or did you mean {close[0]}" if close else "leave it out")
            raise ValueError(f"{argument} is not supported by a streamed {name}: {fix}.")
    ids_BS = given.get("input_ids")
    if not isinstance(ids_BS, Tensor) or ids_BS.ndim != 2 or ids_BS.numel() == 0 or ids_BS.is_floating_point():
        got = f"{tuple(ids_BS.shape)}, {ids_BS.dtype}" if isinstance(ids_BS, Tensor) else type(ids_BS).__name__
        raise ValueError(
            "input_ids must be token ids of shape (batch, sequence), at least one each, of an integer dtype; got "
            f"{got}."
        )
    _check_range("input_ids", ids_BS, vocab_size)
    return ids_BS


def _lengths(mask: Any, ids_BS: Tensor) -> Tensor | None:
    """Return the tokens of each row that are not padding (B,); None where there is no padding."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != ids_BS.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be of the shape of input_ids, {tuple(ids_BS.shape)}, not {shape}: masks other than "
            "right padding are not supported. Pass document_ids for packed documents; for plain causal attention leave "
            "it out."
        )
    lengths_B = (mask != 0).sum(1)
    places_S = torch.arange(ids_BS.shape[1], device=mask.device)
    if not torch.equal(mask.to(torch.long), (places_S < lengths_B[:, None]).long()):
        raise ValueError(
            "attention_mask must be 1 for tokens and 0 for padding on the right (tokenizer.padding_side='right'); "
            "left padding and masks with holes are not supported. Pass document_ids for packed documents."
        )
    return lengths_B.to(ids_BS.device) if bool((lengths_B < ids_BS.shape[1]).any()) else None


def _check_range(name: str, ids_BS: Tensor, vocab_size: int, ignored: int | None = None) -> None:
    lowest, highest = (
        int(ids_BS.masked_fill(ids_BS == ignored, 0).min() if ignored else ids_BS.min()),
        int(ids_BS.max()),
    )
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        also = f" or {ignored} (ignored)" if ignored else ""
        raise ValueError(
            f"{name} must be token ids from 0 to {vocab_size - 1}{also}, the vocabulary of the model; {wrong} is among "
            "them. Does the tokenizer belong to this model?"
        )


def _targets(labels: Any, shift_labels: Any, ids_BS: Tensor, vocab_size: int) -> Tensor | None:
    """Return `shift_labels` (B, S) as they are, or labels shifted by one, (B, S-1); None without either."""
    name = "labels" if shift_labels is None else "shift_labels"
    given = labels if shift_labels is None else shift_labels
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.shape != ids_BS.shape or given.is_floating_point():
        shape = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be whole numbers of the shape of input_ids, {tuple(ids_BS.shape)}, not {shape}.")
    _check_range(name, given, vocab_size, IGNORE)
    given = given.to(device=ids_BS.device, dtype=torch.long)
    return given if shift_labels is not None else given[:, 1:]


def _count(num_items: Any, targets: Tensor) -> Tensor:
    """Return the divisor of the summed loss: `num_items`, or else the number of targets.

    It is 1 where there is no target, so that such a batch has loss 0.
    """
    if num_items is None:
        return (targets != IGNORE).sum().clamp_min(1)
    count = torch.as_tensor(num_items, device=targets.device)
    if count.numel() == 1 and not bool((targets != IGNORE).any()):
        return torch.ones((), dtype=torch.long, device=targets.device)
    if count.numel() != 1 or bool((count <= 0).any()):
        raise ValueError(f"num_items_in_batch={num_items!r}: give the positive number of target tokens in the batch.")
    return count.reshape(())
